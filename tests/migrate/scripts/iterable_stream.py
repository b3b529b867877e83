"""A stream without a length, divided over workers, trained for a number of steps."""

import argparse
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, self.count, stride):
            x = torch.linspace(-1, 1, 6) * (i % 7)
            yield {"x": x, "y": x.sum().reshape(1) + i % 3}


def infinite(loader):
    while True:
        yield from loader


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--max_steps", type=int, default=12)
    p.add_argument("--device", default="cpu")
    return p.parse_args([])


def main(args):
    torch.manual_seed(0)
    loader = DataLoader(Stream(40), batch_size=4)
    model = nn.Linear(6, 1).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step, batch in enumerate(itertools.islice(infinite(loader), args.max_steps)):
        batch = {k: v.to(args.device) for k, v in batch.items()}
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    print("final", model.weight.sum().item())


if __name__ == "__main__":
    main(get_args())
