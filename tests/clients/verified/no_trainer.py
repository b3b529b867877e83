import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, default_data_collator, get_scheduler, set_seed

from accelerate import Accelerator

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (64, 12))]
loader = DataLoader(data, 4, shuffle=True, collate_fn=default_data_collator)
config = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
decayed = [p for name, p in model.named_parameters() if "norm" not in name]
plain = [p for name, p in model.named_parameters() if "norm" in name]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
schedule = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, 40 * accelerator.num_processes)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
