"""A model whose exponential moving average is evaluated, with clipped gradients."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.state_dict().values(), model.state_dict().values()):
            s.copy_(self.decay * s + (1 - self.decay) * p)


def evaluate(model, loader, device):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            total += F.mse_loss(model(x), y, reduction="sum").item()
            count += len(x)
    return total / count


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    x = torch.randn(64, 6)
    y = (x[:, :2].prod(1, keepdim=True)).tanh()
    train_loader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=BATCH)
    val_loader = DataLoader(TensorDataset(x[48:], y[48:]), batch_size=16)

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    for epoch in range(4):
        model.train()
        for x, y in train_loader:
            x = x.to(device)
            y = y.to(device)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            ema.update(model)
        print(f"epoch {epoch} {evaluate(model, val_loader, device):.6f}")
    print(f"final {evaluate(ema.shadow, val_loader, device):.6f}")


if __name__ == "__main__":
    main()
