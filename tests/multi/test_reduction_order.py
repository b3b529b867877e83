"""A resumed run averages gradients in the order of the run before, from its first step on, on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from tests.ranks import run_on_ranks
from tests.slow import slow

NUM_STEPS = 5


class Model(nn.Module):
    """Layers that are used in another order than they are defined in, so that torch's first order isn't its second."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(31, 7)
        self.first = nn.Linear(5, 31)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.middle = nn.Sequential(nn.Linear(31, 31), nn.ReLU(), nn.Linear(31, 31))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(rows)))


def weights_after(steps: range, folder: Path, resume: bool, accumulation: int = 1, **ddp: Any) -> dict[str, Any]:
    """The weights after each step, saving before every step; from the checkpoint before ``steps`` with ``resume``."""
    handlers = [DistributedDataParallelKwargs(**ddp)] if ddp else []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    if resume:
        accelerator.load_state(folder / f"before_{steps.start}")
        assert all(parameter.grad is None for parameter in model.parameters()) or accumulation > 1
    found: dict[str, Any] = {}
    for step in steps:
        if not resume:
            accelerator.save_state(folder / f"before_{step}")
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = model(torch.randn(6, 5, generator=generator)).square().mean()
            assert torch.isfinite(loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found[str(step)] = {name: value.clone() for name, value in model.module.state_dict().items()}
    return found


def resumed_differences(folder: str, **options: Any) -> list[str]:
    """The steps and names at which a run resumed from any step differs from the run that saved there."""
    path, wrong = Path(folder), []
    expected = weights_after(range(NUM_STEPS), path, False, **options)
    for first in range(NUM_STEPS):
        found = weights_after(range(first, NUM_STEPS), path, True, **options)
        wrong += [
            f"from {first}, step {step}: {name}"
            for step, weights in found.items()
            for name, value in weights.items()
            if not torch.equal(value, expected[step][name])
        ]
    return wrong


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation": 2},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1, "find_unused_parameters": True},
    ],
    ids=["plain", "accumulated", "bucket_views", "unused"],
)
@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=slow)])
def test_a_resumed_run_adds_gradients_in_the_saved_order(
    num_ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    for rank, wrong in enumerate(run_on_ranks(partial(resumed_differences, str(tmp_path), **options), num_ranks)):
        assert not wrong, f"rank {rank}: {wrong[:5]}"


def backwards_of_a_resumed_run(folder: str) -> int:
    path, calls = Path(folder), list[object]()
    weights_after(range(2), path, False)
    backward = torch.autograd.backward

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        backward(*args, **kwargs)

    torch.autograd.backward = counted
    weights_after(range(1, 3), path, True)
    return len(calls)


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, 2), (3, 3)])
def test_a_resumed_run_of_two_ranks_has_no_backward_but_its_own(num_ranks: int, expected: int, tmp_path: Path) -> None:
    """Sums of two ranks don't depend on the order, which more ranks restore by a backward of zeros."""
    assert run_on_ranks(backwards_of_a_resumed_run, num_ranks, str(tmp_path)) == [expected] * num_ranks
