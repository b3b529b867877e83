import os
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
CHECKPOINT = os.path.join(tempfile.mkdtemp(), 'checkpoint.pt')


def get_data():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(48, 3, generator=g)
    return TensorDataset(x, x.norm(dim=1, keepdim=True))


def run(until):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    loader = DataLoader(get_data(), batch_size=BATCH)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0
    if os.path.isfile(CHECKPOINT):
        print("=> loading checkpoint")
        checkpoint = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        start = checkpoint['epoch']
        model.load_state_dict(checkpoint['state_dict'])
        optimizer.load_state_dict(checkpoint['optimizer'])

    for epoch in range(start, until):
        for x, y in loader:
            x = x.to(device)
            y = y.to(device)
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
        torch.save({
            'epoch': epoch + 1,
            'state_dict': model.state_dict(),
            'optimizer': optimizer.state_dict(),
        }, CHECKPOINT)
    x, y = get_data().tensors
    print("final", ((model(x.to(device)) - y.to(device)) ** 2).mean().item())


run(2)
run(4)
