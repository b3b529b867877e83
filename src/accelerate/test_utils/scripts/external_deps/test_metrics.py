"""Checks that metrics over several processes equal those of one process over all samples."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.accelerator import Accelerator
from accelerate.distributed.random import set_seed
from accelerate.plugins.handlers import DataLoaderConfiguration
from accelerate.test_utils.training import RegressionDataset, RegressionModel, Sample

NUM_SAMPLES = 82  # no multiple of a batch, so that the last one is completed


def _outputs(
    model: nn.Module, loader: Iterable[Sample], accelerator: Accelerator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    model.eval()
    found: list[Any] = []
    with torch.no_grad():
        for batch in loader:
            pair = (model(batch["x"]), batch["y"])
            found.append(pair if accelerator is None else accelerator.gather_for_metrics(pair))
    predictions, targets = zip(*found, strict=True)
    return torch.cat(predictions).cpu(), torch.cat(targets).cpu()


def test_torch_metrics(accelerator: Accelerator, num_samples: int = NUM_SAMPLES, batch_size: int = 16) -> None:
    """Check that there are as many predictions as samples, equal to those of the plain loop."""
    set_seed(42)
    dataset = RegressionDataset(length=num_samples, seed=3)
    model = RegressionModel(a=1, b=2)
    expected = _outputs(deepcopy(model), DataLoader(dataset, batch_size=batch_size), None)
    prepared, loader = accelerator.prepare(model, DataLoader(dataset, batch_size=batch_size))
    gathered = _outputs(prepared, loader, accelerator)
    for plain, ours in zip(expected, gathered, strict=True):
        assert len(ours) == num_samples, (len(ours), num_samples)
        assert torch.allclose(torch.sort(plain).values, torch.sort(ours).values, atol=1e-6)


def test_gather_for_metrics_with_non_tensor_objects(accelerator: Accelerator) -> None:
    """Check that texts are gathered too, each once."""
    samples = [f"sample {index}" for index in range(NUM_SAMPLES)]
    loader = accelerator.prepare(DataLoader(samples, batch_size=16))  # pyright: ignore[reportArgumentType]
    gathered = [text for batch in loader for text in accelerator.gather_for_metrics(batch)]
    assert sorted(gathered) == sorted(samples), len(gathered)


def main() -> None:
    """Run all checks."""
    for split_batches in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
        accelerator.print(f"metrics, split_batches={split_batches}")
        test_torch_metrics(accelerator)
        test_torch_metrics(accelerator, num_samples=99)
        test_gather_for_metrics_with_non_tensor_objects(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
