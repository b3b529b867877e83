import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, x):
        return self.net(x)


def distill(student: nn.Module, teacher: nn.Module, loader: DataLoader, epochs: int = 2, device: str = "cpu"):
    """`student` answers like `teacher`."""
    optimizer = torch.optim.Adam(params=student.parameters(), lr=4e-3)
    teacher.eval()
    for epoch in range(epochs):
        for step, (x,) in enumerate(loader):
            x = x.to(device)
            with torch.no_grad():
                wanted = F.softmax(teacher(x) / 2.0, dim=-1)
            loss = F.kl_div(F.log_softmax(student(x) / 2.0, dim=-1), wanted, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2 == 0:
                print(epoch, step, loss.item())
    return student


if __name__ == "__main__":
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    big = MLP(32).to(device)
    small = MLP(8).to(device)
    data = torch.randn(48, 8)
    distill(small, big, DataLoader(TensorDataset(data), batch_size=BATCH), device=device)
    print("final", F.mse_loss(small(data.to(device)), big(data.to(device))).item())
