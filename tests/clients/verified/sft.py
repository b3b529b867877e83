import os

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

assets = os.environ["CLIENT_ASSETS"]
args = SFTConfig(
    "out", per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True, bf16=False,
    save_strategy="no", disable_tqdm=True, max_length=32, gradient_checkpointing=False,
)  # fmt: skip
data = load_dataset("json", data_files=f"{assets}/text/train.jsonl", split="train")
SFTTrainer(model=f"{assets}/llama", args=args, train_dataset=data).train()
