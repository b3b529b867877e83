"""Checks that a run resumed from a checkpoint ends like an uninterrupted one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.distributed.random import set_seed
from accelerate.test_utils.training import RegressionDataset, RegressionModel, Sample

NUM_EPOCHS = 3


def _setup(accelerator: Accelerator) -> tuple[nn.Module, Optimizer, LRScheduler, Iterable[Sample]]:
    set_seed(42)
    model = RegressionModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    loader = DataLoader(RegressionDataset(length=64, seed=1), batch_size=8, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def _train_one_epoch(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, loader: Iterable[Sample]
) -> None:
    model.train()
    for batch in loader:
        accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _parameters(accelerator: Accelerator, model: nn.Module) -> list[float]:
    return [value.item() for value in accelerator.unwrap_model(model).state_dict().values()]


def training_function(folder: str) -> None:
    """Check that three epochs in one run, and one plus two after ``load_state``, end with the same parameters."""
    accelerator = Accelerator()
    objects = _setup(accelerator)
    for epoch in range(NUM_EPOCHS):
        _train_one_epoch(accelerator, *objects)
        if epoch == 0:
            accelerator.save_state(str(Path(folder, "epoch_0")))
    expected = _parameters(accelerator, objects[0])
    accelerator.free_memory()

    objects = _setup(accelerator)
    accelerator.load_state(str(Path(folder, "epoch_0")))
    for _ in range(NUM_EPOCHS - 1):
        _train_one_epoch(accelerator, *objects)
    continued = _parameters(accelerator, objects[0])
    assert expected == continued, (expected, continued)
    accelerator.end_training()


def main() -> None:
    """Run all checks."""
    from accelerate.distributed.collectives import broadcast_object_list

    accelerator = Accelerator()
    # One folder for all processes, named by the first one.
    names = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    training_function(str(broadcast_object_list(names)[0]))


if __name__ == "__main__":
    main()
