"""trl's SFTTrainer on a tiny Llama, as `trl sft` calls it; with LoRA on request."""

from __future__ import annotations

import sys

from datasets import load_dataset
from peft import LoraConfig
from report import ASSETS, OUTPUT, report, weight_of
from trl import SFTConfig, SFTTrainer

adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if "lora" in sys.argv else None
trainer = SFTTrainer(
    model=f"{ASSETS}/llama",
    args=SFTConfig(
        f"{OUTPUT}/sft", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, max_length=32, gradient_checkpointing=False,
    ),
    train_dataset=load_dataset("json", data_files=f"{ASSETS}/text/train.jsonl", split="train"),
    eval_dataset=load_dataset("json", data_files=f"{ASSETS}/text/train.jsonl", split="train[:10]"),
    peft_config=adapter,
)  # fmt: skip
trainer.train()
history = trainer.state.log_history
report(
    losses=[entry["loss"] for entry in history if "loss" in entry],
    evaluation=trainer.evaluate()["eval_loss"],
    weight=weight_of(trainer.accelerator.unwrap_model(trainer.model)),
)
