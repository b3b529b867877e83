"""The factor of a weighted window is as exact as the loss, whatever the weights are counted in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.training import window_weights as weighting

LARGE = 2**24


def gradient_of(weights: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the sum of ones over all of ``weights``: the micro-batches over their weight."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(weights))
    model = accelerator.prepare(nn.Linear(1, 1, bias=False).to(dtype))
    for weight in weights:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1, dtype=dtype)).sum(), weight=weight)
    return model.weight.grad


@pytest.mark.parametrize("count", [3, 7, 11])
@pytest.mark.parametrize("steps", [1, 3])
def test_float64_gradients_are_divided_to_the_last_bit_but_one(count: int, steps: int) -> None:
    found = gradient_of([count] * steps, torch.float64)
    assert found.dtype == torch.float64
    assert abs(found.item() - 1 / count) <= 2e-16


@pytest.mark.parametrize(
    "weights",
    [
        [LARGE, 1],
        [torch.tensor(LARGE), torch.tensor(1)],
        [torch.tensor(float(LARGE)), torch.tensor(1.0)],
        [torch.tensor(float(LARGE), dtype=torch.bfloat16), 1],
    ],
)
def test_more_tokens_than_float32_can_count_are_counted(weights: list[Any]) -> None:
    assert gradient_of(weights, torch.float64).item() == 2 * (1 / (LARGE + 1))


def test_half_precision_losses_keep_a_float32_factor() -> None:
    assert gradient_of([3], torch.bfloat16).item() == torch.tensor(1 / 3, dtype=torch.bfloat16).item()


@pytest.mark.parametrize(
    "weights", [[float("nan")], [-1], [float("inf")], [torch.tensor(-2)], [3, float("nan")], [3, -4]]
)
def test_a_total_weight_that_counts_nothing_shows_in_the_gradients(weights: list[Any]) -> None:
    assert gradient_of(weights, torch.float32).isnan().all()
    assert gradient_of([0, 0], torch.float32).isfinite().all()


def test_a_device_without_float64_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weighting, "widest_float", lambda device: torch.float32)
    assert abs(gradient_of([3, 3], torch.float32).item() - 1 / 3) < 1e-7
    assert gradient_of([4], torch.float32).item() == 0.25
    assert [record.message for record in caplog.records if "has no float64" in record.message] != []
    assert len([record for record in caplog.records if "has no float64" in record.message]) == 1
