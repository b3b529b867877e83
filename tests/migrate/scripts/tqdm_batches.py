"""A loop of today's repositories: a config in a dataclass, a bar by batches, a schedule for each of them, wandb-like logs."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

BATCH = 8


@dataclass
class TrainConfig:
    batch_size: int = BATCH
    epochs: int = 2
    lr: float = 0.05
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(config):
    torch.manual_seed(15)
    x = torch.randn(80, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train_set, val_set = random_split(data, [64, 16])
    train_loader = DataLoader(train_set, batch_size=config.batch_size)
    val_loader = DataLoader(val_set, batch_size=config.batch_size)
    model = nn.Linear(5, 1).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    total_steps = len(train_loader) * config.epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config.lr, total_steps=total_steps)
    pbar = tqdm(total=total_steps, desc="training")
    for epoch in range(config.epochs):
        model.train()
        for inputs, targets in train_loader:
            inputs = inputs.to(config.device)
            targets = targets.to(config.device)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            pbar.update(1)
            pbar.set_postfix(loss=f"{loss.item():.4f}")
        model.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, targets in tqdm(val_loader, desc="validation", leave=False):
                pred = model(inputs.to(config.device))
                total += nn.functional.mse_loss(pred, targets.to(config.device), reduction="sum").item()
        print(f"final epoch {epoch}: {total / len(val_set):.6f}")
    pbar.close()
    print("final bar", pbar.n == pbar.total)


if __name__ == "__main__":
    main(TrainConfig())
