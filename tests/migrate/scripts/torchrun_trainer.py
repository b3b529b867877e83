"""A trainer in a class that wraps its model itself, resumes from a snapshot, and counts on torchrun."""

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT = os.environ.get("SNAPSHOT", "/nowhere/snapshot.pt")


def ddp_setup():
    init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.rank = int(os.environ["RANK"])
        self.model = model.to("cpu")
        self.data = data
        self.optimizer = optimizer
        self.epochs_run = 0
        self.path = path
        if os.path.exists(path):
            self._load(path)
        self.model = DDP(self.model)

    def _load(self, path):
        place = {"cuda:0": "cpu"}
        snapshot = torch.load(path, map_location=place)
        self.model.load_state_dict(snapshot["MODEL"])
        self.epochs_run = snapshot["EPOCHS"]

    def _batch(self, source, target):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), target)
        loss.backward()
        self.optimizer.step()

    def _epoch(self, epoch):
        self.data.sampler.set_epoch(epoch)
        for source, target in self.data:
            self._batch(source.to("cpu"), target.to("cpu"))

    def _save(self, epoch):
        torch.save({"MODEL": self.model.module.state_dict(), "EPOCHS": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self._epoch(epoch)
            if self.rank == 0 and os.path.isdir(os.path.dirname(self.path)):
                self._save(epoch)
        if self.rank == 0:
            print("final", *(p.sum().item() for p in self.model.module.parameters()))


def main():
    ddp_setup()
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    Trainer(model, loader, optimizer, SNAPSHOT).train(3)
    destroy_process_group()


if __name__ == "__main__":
    main()
