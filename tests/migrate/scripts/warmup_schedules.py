"""A warm-up in every batch by LambdaLR, then StepLR once an epoch."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARMUP_STEPS = 10
EPOCHS = 4


def build_data():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    return DataLoader(TensorDataset(x, x.abs().sum(1, keepdim=True)), batch_size=8)


def train():
    loader = build_data()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    decay = StepLR(optimizer, step_size=2, gamma=0.1)
    step = 0
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            inputs = inputs.to(device)
            targets = targets.to(device)
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step < WARMUP_STEPS:
                warmup.step()
            step += 1
        decay.step()
        print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.5f} loss {loss.item():.5f}")


if __name__ == "__main__":
    train()
