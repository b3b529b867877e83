import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        return torch.relu(self.frozen(torch.relu(self.body(x))))


class Head(Encoder):
    def __init__(self):
        nn.Module.__init__(self)
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x)


torch.manual_seed(0)
encoder, head = Encoder().to(device), Head().to(device)
trainable = filter(lambda p: p.requires_grad, encoder.parameters())
optimizer = torch.optim.Adam([
    {'params': trainable},
    {'params': head.parameters(), 'lr': 1e-2, 'weight_decay': 1e-4},
], lr=1e-3)
x = torch.randn(48, 6)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=BATCH)

for epoch in range(3):
    for data, target in loader:
        optimizer.zero_grad()
        out = head(encoder(data.to(device)))
        loss = nn.functional.l1_loss(out, target.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(itertools.chain(encoder.parameters(), head.parameters()), 1.0)
        optimizer.step()
    print('epoch {}: {:.7f}'.format(epoch, loss.item()))
with torch.no_grad():
    print("final", nn.functional.l1_loss(head(encoder(x.to(device))), x[:, :1].to(device)).item())
