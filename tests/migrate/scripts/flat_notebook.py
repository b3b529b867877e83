# %% a notebook, exported
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# %% data
x = torch.randn(64, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
train_dl = DataLoader(TensorDataset(x, y), batch_size=BATCH)

# %% model
net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)).to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)

# %% train
for epoch in range(3):
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)   # move to the GPU
        loss = F.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: {loss.item():.6f}")

# %% look
with torch.no_grad():
    print("final", F.cross_entropy(net(x.to(device)), y.to(device)).item())
