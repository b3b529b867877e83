"""DDP by hand: each rank evaluates its part, the counts are reduced, and rank 0 reports and keeps the best."""

import os
import random
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def is_main():
    return dist.get_rank() == 0


def get_loaders(batch_size, world_size, rank):
    x = torch.randn(96, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train_set, val_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=False)
    val_sampler = DistributedSampler(val_set, num_replicas=world_size, rank=rank, shuffle=False)
    return (
        DataLoader(train_set, batch_size=batch_size, sampler=train_sampler, drop_last=True),
        DataLoader(val_set, batch_size=batch_size, sampler=val_sampler),
        train_sampler,
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = torch.tensor(0.0, device=device)
    total = torch.tensor(0.0, device=device)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        correct += (model(x).argmax(1) == y).sum()
        total += y.numel()
    dist.all_reduce(correct, op=dist.ReduceOp.SUM)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (correct / total).item()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    set_seed(0)
    train_loader, val_loader, train_sampler = get_loaders(8, world_size, rank)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * world_size)
    best = 0.0
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, val_loader, device)
        if is_main():
            print(f"epoch {epoch} accuracy {accuracy:.4f}")
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), os.path.join(tempfile.gettempdir(), "ddp_metric_best.pt"))
        dist.barrier()
    if is_main():
        print("final", best, *(p.sum().item() for p in model.module.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
