"""mnist_hogwild, cured: the worker function is called once, and the launcher starts the processes."""
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return F.log_softmax(self.fc(x.view(-1, 16)), dim=1)


def train(rank, model, device, dataset):
    torch.manual_seed(1 + rank)
    train_loader = DataLoader(dataset, batch_size=BATCH)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()


if __name__ == '__main__':
    device = torch.device("cpu")
    torch.manual_seed(1)
    dataset = TensorDataset(torch.rand(64, 16), torch.randint(0, 4, (64,)))
    model = Net().to(device)
    train(0, model, device, dataset)
    print("final", sum(p.sum().item() for p in model.parameters()))
