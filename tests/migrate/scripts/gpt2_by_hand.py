"""train_gpt2.py in the manner of build-nanogpt: a loader of its own by rank, a loss averaged over processes."""
import inspect
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 12)
        self.lm_head = nn.Linear(12, 16, bias=False)

    def forward(self, idx, targets=None):
        logits = self.lm_head(torch.tanh(self.wte(idx)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, device_type):
        param_dict = {pn: p for pn, p in self.named_parameters()}
        optim_groups = [{'params': [p for p in param_dict.values() if p.dim() >= 2], 'weight_decay': weight_decay}]
        use_fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=use_fused)


class DataLoaderLite:
    def __init__(self, B, T, process_rank, num_processes):
        self.B = B
        self.T = T
        self.process_rank = process_rank
        self.num_processes = num_processes
        self.tokens = torch.arange(1000) * 7 % 16
        self.current_position = self.B * self.T * self.process_rank

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position: self.current_position + B * T + 1]
        x = (buf[:-1]).view(B, T)
        y = (buf[1:]).view(B, T)
        self.current_position += B * T * self.num_processes
        if self.current_position + (B * T * self.num_processes + 1) > len(self.tokens):
            self.current_position = self.B * self.T * self.process_rank
        return x, y


ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo')
    ddp_rank = int(os.environ['RANK'])
    ddp_local_rank = int(os.environ['LOCAL_RANK'])
    ddp_world_size = int(os.environ['WORLD_SIZE'])
    device = f'cuda:{ddp_local_rank}' if torch.cuda.is_available() else 'cpu'
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    master_process = ddp_rank == 0
else:
    ddp_rank = 0
    ddp_local_rank = 0
    ddp_world_size = 1
    master_process = True
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    print(f"using device: {device}")

device_type = "cuda" if device.startswith("cuda") else "cpu"
torch.manual_seed(1337)
total_batch_size = 256
B = 4
T = 8
assert total_batch_size % (B * T * ddp_world_size) == 0
grad_accum_steps = total_batch_size // (B * T * ddp_world_size)
train_loader = DataLoaderLite(B=B, T=T, process_rank=ddp_rank, num_processes=ddp_world_size)
torch.set_float32_matmul_precision('high')

model = GPT()
model.to(device)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank] if device_type == "cuda" else None)
raw_model = model.module if ddp else model
optimizer = raw_model.configure_optimizers(weight_decay=0.1, learning_rate=6e-3, device_type=device_type)

for step in range(5):
    model.train()
    optimizer.zero_grad()
    loss_accum = 0.0
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        x, y = x.to(device), y.to(device)
        if ddp:
            model.require_backward_grad_sync = (micro_step == grad_accum_steps - 1)
        logits, loss = model(x, y)
        loss = loss / grad_accum_steps
        loss_accum += loss.detach()
        loss.backward()
    if ddp:
        dist.all_reduce(loss_accum, op=dist.ReduceOp.SUM)
        loss_accum /= ddp_world_size
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    lr = 6e-3 * 0.5 * (1.0 + math.cos(math.pi * step / 5))
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr
    optimizer.step()
    if master_process:
        print(f"final step {step:5d} | norm: {norm:.5f} | loss: {loss_accum.item():.5f} | weights: {sum(p.sum() for p in model.parameters()).item():.6f}")

if ddp:
    destroy_process_group()
