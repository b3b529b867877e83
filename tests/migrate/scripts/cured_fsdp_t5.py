"""fsdp_t5, cured: the version for one device. The launcher shards it (`accelerate launch --use_fsdp`)."""
import torch
import torch.optim as optim
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    total = torch.zeros(2).to(device)
    for source, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(source.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        total[0] += loss.item()
        total[1] += len(source)
    print(f"Train Epoch: {epoch}, Loss: {total[0] / total[1]:.4f}")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    train_loader = DataLoader(data, batch_size=BATCH)
    model = nn.Sequential(Block(), Block()).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.002)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.85)
    for epoch in range(1, 3):
        train(model, device, train_loader, optimizer, epoch)
        scheduler.step()
    print("final", sum(p.sum().item() for p in model.parameters()))


if __name__ == '__main__':
    main()
