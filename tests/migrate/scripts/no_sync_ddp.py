import contextlib
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def get_rank():
    return int(os.environ.get("RANK", 0))


dist.init_process_group("gloo")
rank, world = get_rank(), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
x = torch.randn(64, 3)
data = TensorDataset(x, x.cumsum(1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), drop_last=True)
model = DDP(nn.Linear(3, 3), bucket_cap_mb=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        is_last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = nn.functional.mse_loss(model(a), b) / ACCUMULATE
            loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
if rank == 0:
    print("final", nn.functional.mse_loss(model.module(x), x.cumsum(1)).item(), world)
