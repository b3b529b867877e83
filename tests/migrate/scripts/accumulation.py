import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
ACCUMULATE = 3

torch.manual_seed(5)
features = torch.randn(52, 7)
labels = (features.sum(dim=1) > 0).float().unsqueeze(1)
dataloader = DataLoader(TensorDataset(features, labels), BATCH)

model = nn.Linear(7, 1).cuda() if torch.cuda.is_available() else nn.Linear(7, 1)
criterion = nn.BCEWithLogitsLoss()
optimizer = optim.SGD(model.parameters(), lr=0.2)

optimizer.zero_grad()
for epoch in range(2):
    for step, batch in enumerate(dataloader):
        inputs, target = batch
        if torch.cuda.is_available():
            inputs = inputs.cuda()
            target = target.cuda()
        loss = criterion(model(inputs), target) / ACCUMULATE
        loss.backward()
        if (step + 1) % ACCUMULATE == 0 or step + 1 == len(dataloader):
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        print(step, loss.item())

weight = next(model.parameters())
print("last", weight.abs().sum().item())
