"""FSDP by hand in the manner of the T5 tutorial: a wrapping policy, summed losses, a full state dict on rank 0."""
import functools
import os

import torch
import torch.distributed as dist
import torch.optim as optim
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def train(model, rank, world_size, train_loader, optimizer, epoch, sampler=None):
    model.train()
    local_rank = int(os.environ['LOCAL_RANK'])
    fsdp_loss = torch.zeros(2).to(local_rank)
    if sampler:
        sampler.set_epoch(epoch)
    for source, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(source.to(local_rank)), target.to(local_rank))
        loss.backward()
        optimizer.step()
        fsdp_loss[0] += loss.item()
        fsdp_loss[1] += len(source)
    dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"Train Epoch: {epoch}, Loss: {fsdp_loss[0] / fsdp_loss[1]:.4f}")


def fsdp_main():
    rank = int(os.environ['RANK'])
    world_size = int(os.environ['WORLD_SIZE'])
    dist.init_process_group("nccl")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    sampler = DistributedSampler(data, rank=rank, num_replicas=world_size, shuffle=True)
    train_loader = DataLoader(data, batch_size=8, sampler=sampler)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    model = FSDP(nn.Sequential(Block(), Block()), auto_wrap_policy=policy,
                 mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
                 sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.cuda.current_device())
    optimizer = optim.AdamW(model.parameters(), lr=0.002)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
    for epoch in range(1, 3):
        train(model, rank, world_size, train_loader, optimizer, epoch, sampler=sampler)
        scheduler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    fsdp_main()
