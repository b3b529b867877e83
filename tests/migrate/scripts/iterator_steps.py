import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 8, 14


def get_batch(batches, loader):
    try:
        return next(batches), batches
    except StopIteration:
        batches = iter(loader)
        return next(batches), batches


def main() -> None:
    device = torch.device('cpu')
    torch.manual_seed(11)
    x = torch.randn(40, 5)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=BATCH)
    model: nn.Module = nn.Linear(5, 1).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(loader)
    for step in range(STEPS):
        (inputs, targets), batches = get_batch(batches, loader)
        inputs, targets = inputs.to(device), targets.to(device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == '__main__':
    main()
