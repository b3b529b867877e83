"""A sweep of learning rates before training, from which the model is put back."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LRFinder:
    def __init__(self, model, optimizer, criterion, device):
        self.model, self.optimizer, self.criterion, self.device = model, optimizer, criterion, device
        self.history = {"lr": [], "loss": []}
        self.saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def range_test(self, loader, start_lr=1e-4, end_lr=0.5, num_iter=10):
        factor = (end_lr / start_lr) ** (1 / num_iter)
        lr = start_lr
        batches = iter(loader)
        for _ in range(num_iter):
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            x, y = x.to(self.device), y.to(self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.history["lr"].append(lr)
            self.history["loss"].append(loss.item())
            lr *= factor

    def reset(self):
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(self.saved[1])

    def suggestion(self):
        best = min(range(len(self.history["loss"])), key=self.history["loss"].__getitem__)
        return self.history["lr"][best] / 10


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(48, 5)
    train_loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=8)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    finder = LRFinder(model, optimizer, criterion, device)
    finder.range_test(train_loader)
    finder.reset()
    lr = finder.suggestion()
    print(f"suggested {lr:.6f}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    for epoch in range(2):
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
