"""A small run of two ranks that goes on long enough to be looked at: it learns, saves, warns and waits for its data.

accelerate launch --cpu --num_processes 2 live_run.py FOLDER [seconds]
"""

from __future__ import annotations

import logging
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Spirals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two spirals that a small network can tell apart; some samples take longer to read."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 2, (size,), generator=generator)
        radius = torch.rand(size, generator=generator)
        angle = 6 * radius + 3.14159 * self.labels
        noise = 0.02 * torch.randn(size, 2, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 64 == 0:
            time.sleep(0.004)
        return self.points[index], self.labels[index]


def main(folder: str, seconds: float) -> None:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2400)
    loader = DataLoader(Spirals(4096), batch_size=32, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.init_trackers("spirals", {"width": 64, "batch size": 32})
    run = accelerator.watch_run(5, total_steps=1200)
    accelerator.resume()
    began, accuracy = time.monotonic(), accelerator.streaming_mean()
    while run.updates < 1200 and time.monotonic() - began < seconds:
        for points, labels in loader:
            optimizer.zero_grad()
            outputs = model(points)
            loss = nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            accuracy.update((outputs.argmax(dim=1) == labels).float())
            time.sleep(0.012)
            run.step(loss)
            if run.updates % 150 == 0:
                accelerator.save_state()
        accelerator.log({"accuracy": accuracy.mean()}, step=run.updates)
        accelerator.print(f"step {run.updates}: accuracy {float(accuracy.mean()):.1%}", flush=True)
        accuracy.reset()
        if run.updates == 256 and accelerator.process_index == 1:
            logging.getLogger("spirals").warning("1 sample in 64 takes 4 ms to read; more workers would hide it")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
