import torch
import time
from torch import nn
from torch.utils.data import DataLoader, random_split, TensorDataset

DEVICE = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
torch.manual_seed(0)
if DEVICE == 'cuda':
    torch.backends.cudnn.benchmark = True
ds = TensorDataset(torch.randn(100, 5), torch.randn(100, 1))
train, val = random_split(ds, [80, 20], generator=torch.Generator().manual_seed(0))
tl = DataLoader(train, 10, shuffle=True)
vl = DataLoader(val, 10)
model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
model = torch.compile(model.to(DEVICE), backend='eager')
opt = torch.optim.Adam(model.parameters(), 1e-2)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
loss_fn = nn.MSELoss()
best = float('inf')
for e in range(3):
	model.train()
	start = time.time()
	for a, b in tl:
		a, b = a.to(DEVICE), b.to(DEVICE)
		pred = model(a)
		loss = loss_fn(pred, b)
		loss.backward(); opt.step(); opt.zero_grad()
	model.eval()
	with torch.inference_mode():
		v = sum(loss_fn(model(a.to(DEVICE)), b.to(DEVICE)).item() for a, b in vl) / len(vl)
	sched.step(v)
	if DEVICE == 'cuda':
		torch.cuda.synchronize()
	print(f'{e} {loss.item():.6f} {v:.6f} {opt.param_groups[0]["lr"]:.5f}')
	if v < best: best = v; torch.save(model.state_dict(), '/dev/null')
