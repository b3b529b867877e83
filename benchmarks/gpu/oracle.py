"""The oracle suite's questions, asked on the device: gradients of the true mean, every sample once, exact resume."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle.test_accumulation import CELLS, Announcer, model_of, oracle, ragged, windows_of

from .smoke import accelerator_on


def cells(*, dry: bool, device: str) -> dict[str, tuple[int, int]]:
    """Return the cells tried and the cells wrong of each question."""
    every = CELLS[:: 5 if dry else 1]
    return {
        "gradients of the true mean, float64": _gradients(device, every, torch.float64, 1e-12),
        "gradients of the true mean, float32": _gradients(device, every, torch.float32, 1e-5),
        "every sample evaluated once": _coverage(device),
        "resumed after each batch": _resumes(device, 2 if dry else 8),
    }


@contextlib.contextmanager
def _an_accelerator(device: str, **options: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield accelerator_on(device, **options)


def _gradients(device: str, every: list[tuple[int, int, int]], dtype: torch.dtype, tolerance: float) -> tuple[int, int]:
    wrong = 0
    for steps, count, seed in every:
        data = ragged(1, count, seed)
        with _an_accelerator(device, gradient_accumulation_steps=steps) as accelerator:
            ours = _trained(accelerator, [samples.to(accelerator.device, dtype) for samples in data[0]], dtype)
        expected = oracle(windows_of(data, steps))
        pairs = [pair for window in zip(ours, expected, strict=True) for pair in zip(*window, strict=True)]
        wrong += not all(
            torch.allclose(mine.cpu().double(), right, atol=tolerance, rtol=tolerance) for mine, right in pairs
        )
    return len(every), wrong


def _trained(accelerator: Any, batches: list[torch.Tensor], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    model = model_of().to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loader, seen = Announcer(), []
    accelerator.gradient_state._add_dataloader(loader)
    for number, samples in enumerate(batches):
        loader.end_of_dataloader = number + 1 == len(batches)
        with accelerator.accumulate(model):
            accelerator.backward((model(samples) ** 2).sum(), weight=len(samples))
            if accelerator.sync_gradients:
                seen.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def _coverage(device: str) -> tuple[int, int]:
    wrong = tried = 0
    for size in (1, 7, 16):
        for batch_size in (1, 3, 4):
            for non_blocking in (False, True):
                from accelerate.utils import DataLoaderConfiguration

                config = DataLoaderConfiguration(non_blocking=non_blocking)
                with _an_accelerator(device, dataloader_config=config) as accelerator:
                    data = DataLoader(TensorDataset(torch.arange(size)), batch_size, pin_memory=device == "cuda")
                    data = accelerator.prepare(data)
                    seen = torch.cat([accelerator.gather_for_metrics(rows) for (rows,) in data])
                tried += 1
                wrong += seen.tolist() != list(range(size))
    return tried, wrong


def _resumes(device: str, batches: int) -> tuple[int, int]:
    """Stop after each batch in turn; the batches and the draws of the device's generator that follow are compared."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, _an_accelerator(device) as accelerator:
        torch.manual_seed(1)
        data = DataLoader(TensorDataset(torch.arange(batches * 2.0)), batch_size=2, shuffle=True)
        _model, data = accelerator.prepare(nn.Linear(1, 1), data)

        def rest(loader: Any, saves_to: str) -> list[torch.Tensor]:
            seen: list[torch.Tensor] = []
            for rows in loader:
                seen.append(rows[0] + torch.rand((), device=accelerator.device))
                if saves_to:
                    accelerator.save_state(f"{saves_to}/{len(seen)}")
            return seen

        whole = rest(data, folder)
        for stop in range(1, batches):
            accelerator.load_state(f"{folder}/{stop}")
            found = rest(data, "")
            wrong += not (
                len(found) == batches - stop
                and all(torch.equal(one, other) for one, other in zip(found, whole[stop:], strict=True))
            )
    return batches - 1, wrong
