"""Gradients by torch.func: no module holds the parameters while it trains."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x = torch.randn(64, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)

model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
params = {name: p.detach().clone() for name, p in model.named_parameters()}


def compute_loss(params, inputs, targets):
    return nn.functional.mse_loss(functional_call(model, params, (inputs,)), targets)


step = grad_and_value(compute_loss)
for epoch in range(3):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        grads, loss = step(params, inputs, targets)
        params = {name: p - 0.05 * grads[name] for name, p in params.items()}
    print(f"epoch {epoch} loss {loss.item():.4f}")
print("final", sum(p.sum().item() for p in params.values()))
