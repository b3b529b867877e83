import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '29641'
    # initialize the process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def demo(rank, world_size, epochs):
    setup(rank, world_size)
    torch.manual_seed(2)
    x = torch.randn(32, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=4)

    # create model and move it to GPU with id rank
    net = nn.Linear(4, 1)
    ddp_model = DistributedDataParallel(net, find_unused_parameters=True)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_fn(ddp_model(inputs), labels).backward()
            optimizer.step()
    if rank == 0:
        print("final", loss_fn(ddp_model.module(x), x.sum(1, keepdim=True)).item())
        sys.stdout.flush()

    cleanup()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(demo,
             args=(world_size, 3),
             nprocs=world_size,
             join=True)
