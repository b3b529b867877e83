"""Everything is made by functions that hand it back."""
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

BATCH = 8


def get_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(hidden):
    layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    return layers


def build_loaders():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=g)
    data = TensorDataset(x, x.argmax(dim=1) % 3)
    train, val = random_split(data, [48, 12], generator=g)
    train_loader = DataLoader(train, batch_size=BATCH)
    val_loader = DataLoader(val, batch_size=12)
    return train_loader, val_loader


def build_optimizer(model, lr):
    optimizer = optim.AdamW(model.parameters(), lr=lr)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    return optimizer, scheduler


def train_one_epoch(model, loader, optimizer, loss_fn, device):
    model.train()
    losses = []
    for batch in loader:
        x, y = (t.to(device) for t in batch)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def evaluate(model, loader, loss_fn, device):
    model.eval()
    with torch.inference_mode():
        return sum(loss_fn(model(x.to(device)), y.to(device)).item() for x, y in loader)


def main():
    torch.manual_seed(0)
    device = get_device()
    model = build_model(16)
    model = model.to(device)
    train_loader, val_loader = build_loaders()
    optimizer, scheduler = build_optimizer(model, lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        print("train", train_one_epoch(model, train_loader, optimizer, loss_fn, device))
        print("final", evaluate(model, val_loader, loss_fn, device), scheduler.get_last_lr()[0])
        scheduler.step()


main()
