"""Checks when gradients are equal on all processes: ``no_sync``, ``accumulate``, the end of a loader."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.distributed.random import set_seed
from accelerate.plugins.handlers import GradientAccumulationPlugin
from accelerate.test_utils.training import RegressionDataset, RegressionModel, Sample


def _training_setup(
    accelerator: Accelerator,
) -> tuple[RegressionModel, nn.Module, torch.optim.Optimizer, DataLoader[Sample]]:
    set_seed(42)
    model = RegressionModel()
    reference = deepcopy(model).to(accelerator.device)
    loader = DataLoader(RegressionDataset(length=80, seed=7), batch_size=16)
    prepared, optimizer, loader = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-3), loader)
    return reference, prepared, optimizer, loader


def _backward(model: nn.Module, batch: dict[str, torch.Tensor], accelerator: Accelerator, divisor: int) -> None:
    """Run the plain backward on the samples of all ranks: the prepared one must equal it."""
    x, y = accelerator.gather((batch["x"], batch["y"]))
    (F.mse_loss(model(x), y) / divisor).backward()


def _gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def _close(first: object, second: object) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(_gradients(first), _gradients(second), strict=True))


def test_distributed_sync(accelerator: Accelerator) -> None:
    """Check that gradients differ between ranks inside ``no_sync``, and are the mean of all outside."""
    reference, model, _, loader = _training_setup(accelerator)
    for iteration, batch in enumerate(loader):
        _backward(reference, batch, accelerator, 1)
        last = iteration == len(loader) - 1
        if last:
            accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
        else:
            with accelerator.no_sync(model):
                accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
        assert last or accelerator.num_processes == 1 or not _close(reference, model), iteration
    assert _close(reference, model)


def test_gradient_accumulation(accelerator: Accelerator) -> None:
    """Check that every second and the last batch step, with the gradients of the whole window."""
    reference, model, optimizer, loader = _training_setup(accelerator)
    steps = accelerator.gradient_accumulation_steps
    for iteration, batch in enumerate(loader):
        _backward(reference, batch, accelerator, steps)
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
            due = (iteration + 1) % steps == 0 or iteration == len(loader) - 1
            assert accelerator.sync_gradients == due, (iteration, due)
            assert not due or _close(reference, model), iteration
            optimizer.zero_grad()
        if due:
            reference.zero_grad()


def main() -> None:
    """Run all checks."""
    accelerator = Accelerator()
    accelerator.print("gradients inside and outside no_sync")
    test_distributed_sync(accelerator)
    for steps in (2, 3):
        plugin = GradientAccumulationPlugin(num_steps=steps)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        accelerator.print(f"accumulation over {steps} batches")
        test_gradient_accumulation(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
