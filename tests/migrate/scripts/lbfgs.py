import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH = 16

torch.manual_seed(0)
x = torch.linspace(-1, 1, 32).unsqueeze(1)
train = DataLoader(TensorDataset(x, torch.sin(3 * x)), batch_size=BATCH)
model = torch.nn.Sequential(torch.nn.Linear(1, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

for epoch in range(3):
    for inputs, targets in train:

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        print(epoch, optimizer.step(closure).item())
