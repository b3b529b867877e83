"""A raw PyTorch loop on handwritten digits. after.py is the same loop on any number of processes: five lines."""

import torch
from offline_data import digits
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(42)
train_set, held_out_set = digits()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
held_out_loader = DataLoader(held_out_set, batch_size=64)

model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_function = nn.CrossEntropyLoss()

for epoch in range(5):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()

    model.eval()
    correct = 0
    for images, labels in held_out_loader:
        with torch.no_grad():
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    print(f"epoch {epoch + 1}: {100 * correct / len(held_out_set):.2f}")
