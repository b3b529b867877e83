import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
torch.manual_seed(6)

x = torch.randn(32, 3)
loaders_train = DataLoader(TensorDataset(x, x.sum(1)), batch_size=BATCH)

model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1), nn.Flatten(0))
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
model = nn.DataParallel(model)
model.to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

best, best_weights = float("inf"), None
for epoch in range(3):
    epoch_loss = 0.0
    for inputs, labels in loaders_train:
        inputs, labels = inputs.to(device), labels.to(device)
        with torch.set_grad_enabled(True):
            loss = nn.functional.mse_loss(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward(retain_graph=False)
            optimizer.step()
        epoch_loss += loss.item() * inputs.size(0)
    print("loss", epoch_loss / len(x))
    if epoch_loss < best:
        best, best_weights = epoch_loss, copy.deepcopy(model.module.state_dict())
model.module.load_state_dict(best_weights)
print("final", nn.functional.mse_loss(model(x.to(device)), x.sum(1).to(device)).item())
