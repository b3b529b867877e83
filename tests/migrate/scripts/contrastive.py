"""Two views of each sample, and a loss over all pairs of the batch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TwoViews(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.Generator().manual_seed(i)
        return (
            self.x[i] + 0.1 * torch.randn(8, generator=noise),
            self.x[i] + 0.1 * torch.randn(8, generator=noise),
        )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.projector = nn.Linear(16, 4)

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(z1, z2, temperature=0.5):
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(-1e9)
    n = z1.size(0)
    labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(device)
    return F.cross_entropy(sim, labels)


def main():
    torch.manual_seed(0)
    loader = DataLoader(TwoViews(64), batch_size=16, shuffle=True, drop_last=True)
    model = Encoder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        total = 0.0
        for v1, v2 in loader:
            v1, v2 = v1.to(device), v2.to(device)
            loss = nt_xent(model(v1), model(v2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
