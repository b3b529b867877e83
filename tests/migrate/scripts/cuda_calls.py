import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader

BATCH = 8
use_gpu = torch.cuda.is_available()

class Squares(Dataset):
    def __len__(self): return 48
    def __getitem__(self, i):
        x = torch.tensor([i / 48.0])
        return x, x ** 2

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 20), nn.Sigmoid(), nn.Linear(20, 1))
loss_fn = nn.MSELoss()
if use_gpu:
    model.cuda(); loss_fn.cuda()
optim = torch.optim.RMSprop(model.parameters(), lr=0.01)
loader = DataLoader(Squares(), batch_size=BATCH, shuffle=False, drop_last=True)

for epoch in range(4):
    running = 0.
    for i, data in enumerate(loader, 0):
        x, t = data
        if use_gpu: x, t = x.cuda(non_blocking=True), t.cuda(non_blocking=True)
        optim.zero_grad(); out = model(x)
        loss = loss_fn(out, t); loss.backward(); optim.step()
        running += loss.item()
    print('epoch', epoch, running)
grid = torch.linspace(0, 1, 11).unsqueeze(1)
if use_gpu:
    grid = grid.cuda()
print('final', model(grid).sum().item())
