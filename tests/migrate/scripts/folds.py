import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')
torch.manual_seed(0)
X = torch.randn(60, 4); Y = X[:, :1] * 2 - X[:, 1:2]
data = TensorDataset(X, Y)
scores = []
for fold in range(3):
    val_idx = list(range(fold * 20, fold * 20 + 20))
    train_idx = [i for i in range(60) if i not in val_idx]
    train_loader = DataLoader(Subset(data, train_idx), batch_size=10, shuffle=True)
    val_loader = DataLoader(Subset(data, val_idx), batch_size=10)
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    best, best_state, bad = 1e9, None, 0
    for epoch in range(6):
        model.train()
        for xb, yb in train_loader:
            xb, yb = xb.to(device), yb.to(device)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(xb), yb).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val = torch.stack([nn.functional.mse_loss(model(a.to(device)), b.to(device)) for a, b in val_loader]).mean().item()
        if val < best - 1e-4:
            best, best_state, bad = val, copy.deepcopy(model.state_dict()), 0
        else:
            bad += 1
            if bad > 1:
                break
    model.load_state_dict(best_state)
    scores.append(best)
    print(f'fold {fold} best {best:.6f}')
print(f'final {sum(scores) / 3:.6f}')
