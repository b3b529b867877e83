"""Two stages: the head alone, then everything with a new optimizer; bars, and the best checkpoint."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

BATCH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_requires_grad(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def fit(model, optimizer, train_loader, val_loader, device, epochs, path):
    best = float("inf")
    for epoch in range(epochs):
        model.train()
        bar = tqdm(train_loader, disable=True)
        for x, y in bar:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_description(f"{loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            val = sum(nn.functional.cross_entropy(model(x.to(device)), y.to(device)).item() for x, y in val_loader)
        print(f"epoch {epoch} val {val:.6f}")
        if val < best:
            best = val
            torch.save(model.state_dict(), path)
    return best


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    y = (x.sum(1) > 0).long()
    train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=BATCH)
    val_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)
    model = Net().to(device)
    path = os.path.join(tempfile.gettempdir(), "fine_tune_best.pt")

    set_requires_grad(model.backbone, False)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    fit(model, optimizer, train_loader, val_loader, device, 2, path)

    set_requires_grad(model.backbone, True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = fit(model, optimizer, train_loader, val_loader, device, 2, path)
    print(f"final {best:.6f}")


if __name__ == "__main__":
    main()
