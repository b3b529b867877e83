"""A script that trains, slowly, and goes on where an earlier start of it was preempted."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 3
folder = Path(sys.argv[1])
begun = folder / f"begun_{os.environ.get('SLURM_PROCID')}"
if "WAITS_AT_START" in os.environ and not begun.exists():  # for a signal
    begun.touch()
    time.sleep(60)
accelerator = Accelerator(cpu=True, project_dir=folder)
set_seed(3)
model, rows = nn.Linear(4, 1), torch.randn(160, 4)
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters()),
    DataLoader(rows, batch_size=2, shuffle=True),  # pyright: ignore
)
watch = accelerator.watch_run(every=5)
resumed = accelerator.resume()
rank = accelerator.process_index
with (folder / f"starts_{rank}.txt").open("a") as file:
    file.write(f"{os.getpid()} {resumed}\n")
for _ in range(loader.iteration, EPOCHS):
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
        time.sleep(float(os.environ.get("PAUSE", "0.03")))
(folder / f"weights_{rank}.txt").write_text(str([value.tolist() for value in model.state_dict().values()]))
accelerator.end_training()
