"""Train the CNN of before.py on one process or many, with five changed lines.

python examples/after.py
accelerate launch --cpu --num_processes 2 examples/after.py
"""

import torch
from offline_data import digits
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(42)
train_set, _ = digits()
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)

model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loss_function = nn.CrossEntropyLoss()
model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

for epoch in range(5):
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
