import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(1)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (64, 12))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
args = TrainingArguments(
    "out", per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True,
)  # fmt: skip
Trainer(model, args, train_dataset=data).train()
