"""Averaged weights by torch.optim.swa_utils: a second schedule, BatchNorm brought up to date at the end."""
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
torch.manual_seed(14)
x = torch.randn(64, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_fn = nn.MSELoss()
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa_start = 2
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
for epoch in range(4):
    for input, target in loader:
        optimizer.zero_grad()
        loss_fn(model(input.to(device)), target.to(device)).backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader, swa_model)
with torch.no_grad():
    print("final", swa_model(x.to(device)).sum().item(), sum(p.sum().item() for p in model.parameters()))
