"""Started with torchrun --nproc_per_node 2."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")

    torch.manual_seed(0)
    data = torch.randn(64, 5)
    dataset = TensorDataset(data, data.prod(dim=1, keepdim=True))
    train_sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    train_loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=train_sampler, num_workers=0)
    val_sampler = DistributedSampler(dataset, shuffle=False)
    val_loader = DataLoader(dataset, batch_size=8, sampler=val_sampler)

    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)

    for epoch in range(3):
        train_sampler.set_epoch(epoch)  # a new order
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        total = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in val_loader:
                x, y = x.to(device), y.to(device)
                total[0] += nn.functional.mse_loss(model(x), y, reduction="sum")
                total[1] += len(x)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        dist.barrier()
        if rank == 0:
            print("final", (total[0] / total[1]).item(), scheduler.get_last_lr()[0])
            torch.save(model.module.state_dict(), os.path.join(tempfile.mkdtemp(), "model.pt"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
