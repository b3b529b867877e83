"""What a page may take for granted: the objects of a small training run, and scripts that commands name."""

import functools  # noqa: F401
import json  # noqa: F401
import os
import random  # noqa: F401
import time  # noqa: F401
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info  # noqa: F401

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
evaluation_loader = DataLoader(dataset, batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
loss_function = nn.CrossEntropyLoss()

SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 4)).mean())
optimizer.step()
accelerator.end_training()
"""
if int(os.environ.get("RANK", 0)) == 0:
    for name in ("script.py", "train.py"):
        Path(name).write_text(SCRIPT)
