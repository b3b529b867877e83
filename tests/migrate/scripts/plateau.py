"""A rate that drops on a plateau of the validation loss, early stopping, and options in a dataclass."""

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class TrainConfig:
    lr: float = 0.05
    batch_size: int = 8
    epochs: int = 6
    patience: int = 2
    hidden: list = field(default_factory=lambda: [16, 8])
    optimizer: str = "adamw"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, math.inf, 0

    def __call__(self, value):
        if value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def build_model(cfg):
    sizes = [4, *cfg.hidden]
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


def build_optimizer(cfg, params):
    if cfg.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=cfg.lr)
    return torch.optim.SGD(params, lr=cfg.lr)


def build_loaders(cfg):
    x = torch.randn(80, 4)
    data = TensorDataset(x, (x[:, :1] * x[:, 1:2]))
    train_set, val_set = random_split(data, [64, 16], generator=torch.Generator().manual_seed(0))
    return DataLoader(train_set, cfg.batch_size, shuffle=True), DataLoader(val_set, cfg.batch_size)


def run_epoch(model, loader, cfg, optimizer=None):
    training = optimizer is not None
    model.train(training)
    losses = []
    with torch.set_grad_enabled(training):
        for x, y in loader:
            x, y = x.to(cfg.device), y.to(cfg.device)
            loss = nn.functional.mse_loss(model(x), y)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def main():
    cfg = TrainConfig()
    torch.manual_seed(0)
    train_loader, val_loader = build_loaders(cfg)
    model = build_model(cfg).to(cfg.device)
    optimizer = build_optimizer(cfg, model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    stopper = EarlyStopping(cfg.patience)
    print(len(asdict(cfg)))
    for epoch in range(cfg.epochs):
        train_loss = run_epoch(model, train_loader, cfg, optimizer)
        val_loss = run_epoch(model, val_loader, cfg)
        scheduler.step(val_loss)
        print(f"{epoch} train {train_loss:.5f} val {val_loss:.5f}")
        if stopper(val_loss):
            break


if __name__ == "__main__":
    main()
