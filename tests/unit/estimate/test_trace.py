"""The traced step against the real one, every allocation counted."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.devices.allocations import AllocationTracker
from accelerate.errors import PreparationError, SettingError
from accelerate.guests.estimate.trace import Moment, TrainingTrace, repeated_blocks, trace_training
from benchmarks.estimates import MODELS, LanguageModel, Row, Subject, compare
from tests.python_path import python_path
from tests.slow import slow_for
from tests.torch_needed import needs_torch

ROOT = Path(__file__).resolve().parents[3]
slow = slow_for("processes of their own")


def traced(make: Any, inputs: Any, **options: Any) -> TrainingTrace:
    return trace_training(Subject("it", make, lambda *_: inputs, 1), device="cpu", **options)


@functools.cache
def in_full_precision(name: str) -> Row:
    """The estimate and the measurement of one of the models."""
    (row,) = compare([subject for subject in MODELS if subject.name == name])
    return row


LSTMS = needs_torch("2.13.0", "the estimate for LSTMs on CPU may be 28 % too low")


@pytest.mark.parametrize(
    "subject", [pytest.param(each, marks=LSTMS if each.name == "LSTM" else (), id=each.name) for each in MODELS]
)
def test_the_estimate_is_the_measured_peak(subject: Subject) -> None:
    row = in_full_precision(subject.name)
    assert abs(row.error) < 0.03, row


@pytest.mark.parametrize("limit", ["SSE41", pytest.param("AVX", marks=slow), pytest.param("AVX2", marks=slow)])
def test_the_estimate_of_convolutions_knows_the_instructions_that_they_are_computed_with(limit: str) -> None:
    """As on an older processor; what this one lacks is the same as what it has."""
    program = """
from benchmarks.estimates import MODELS, compare
convolutional = ("convolutions", "residual network", "U-Net")
rows = compare([subject for subject in MODELS if subject.name in convolutional])
print(len(rows), max(abs(row.error) for row in rows))
"""
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": limit,
        "PYTHONPATH": python_path(ROOT),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    num_models, worst = done.stdout.split()
    assert int(num_models) == 3 and float(worst) < 0.03


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"recompute": True}], ids=str)
def test_the_estimate_follows_precision_and_recomputation(options: dict[str, Any]) -> None:
    subject = next(each for each in MODELS if each.name == "language model")
    plain, (row,) = in_full_precision(subject.name), compare([subject], **options)
    assert abs(row.error) < 0.03, row
    assert row.estimated < plain.estimated


def test_each_kind_of_memory_has_its_own_number() -> None:
    trace = traced(lambda: nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20)), (torch.zeros(4, 10),))
    num_bytes = 4 * (10 * 20 + 20 + 2 * 20)
    assert (trace.num_parameters, trace.weights, trace.gradients) == (num_bytes // 4, num_bytes, num_bytes)
    assert trace.optimizer == 2 * num_bytes + 4 * 4  # and a counter for each of four tensors
    assert trace.buffers == 2 * 20 * 4 + 8
    assert trace.activations >= 4 * 10 * 4 + 2 * 4 * 20 * 4


def test_frozen_weights_have_no_gradients_and_no_state() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        model[0].requires_grad_(False)
        return model

    trace = traced(make, (torch.zeros(1, 10),), optimizer="sgd")
    assert (trace.weights, trace.gradients, trace.optimizer) == (880, 440, 0)


def test_tied_weights_are_there_once() -> None:
    inputs = (torch.zeros(1, 8, dtype=torch.long),)
    plain, tied = traced(LanguageModel, inputs), traced(lambda: LanguageModel(tied=True), inputs)
    assert plain.weights - tied.weights == plain.gradients - tied.gradients == 4 * 1000 * 128


def test_any_optimizer_can_be_asked_about() -> None:
    inputs = (torch.zeros(1, 10),)
    assert traced(lambda: nn.Linear(10, 10), inputs, optimizer="SGD").optimizer == 0
    momentum = traced(lambda: nn.Linear(10, 10), inputs, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    assert momentum.optimizer == 440
    with pytest.raises(SettingError, match=r"optimizer='adamx': torch\.optim has .*adamw"):
        traced(lambda: nn.Linear(10, 10), inputs, optimizer="adamx")


def test_weights_in_lower_precision_are_half_as_large() -> None:
    whole, half = (
        traced(LanguageModel, (torch.zeros(1, 8, dtype=torch.long),), dtype=d) for d in (None, torch.bfloat16)
    )
    assert half.weights * 2 == whole.weights


def test_nothing_is_allocated_for_a_model_larger_than_memory() -> None:
    trace = traced(lambda: nn.Linear(400_000, 400_000, bias=False), (torch.zeros(1, 400_000),))
    assert trace.weights == 4 * 400_000**2


def test_a_model_that_looks_at_values_is_refused_by_name() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(inputs)
            return hidden if hidden.sum().item() > 0 else -hidden

    with pytest.raises(PreparationError, match="it: the forward pass of Deciding depends on values"):
        traced(Deciding, (torch.zeros(1, 2),))
    assert traced(Deciding, None, activations=False).gradients == 24


def test_a_model_that_gives_no_loss_is_refused() -> None:
    class Counting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs).argmax()

    with pytest.raises(PreparationError, match="no loss and no tensor with a gradient"):
        traced(lambda: Counting(2, 2), (torch.zeros(1, 2),))


def test_moments_are_kept_while_no_other_surpasses_them() -> None:
    trace = traced(LanguageModel, (torch.zeros(2, 32, dtype=torch.long),))
    gradients = [failure_time.gradients for failure_time in trace.moments]
    activations = [failure_time.activations for failure_time in trace.moments]
    assert gradients == sorted(set(gradients)) and activations == sorted(set(activations), reverse=True)
    assert isinstance(trace.moments[0], Moment)
    assert max(gradients) <= trace.gradients


def test_blocks_are_those_that_the_model_names_else_its_longest_list() -> None:
    model = LanguageModel(depth=5)
    assert repeated_blocks(model) == list(model.blocks)
    model._no_split_modules = ["Attention"]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    assert len(repeated_blocks(model)) == 5 and type(repeated_blocks(model)[0]).__name__ == "Attention"
    assert repeated_blocks(nn.Linear(2, 2)) == []


def test_accelerators_hand_out_memory_in_pieces_of_512_bytes() -> None:
    for device, expected in (("meta", 512 + 1024), ("cpu", 4 + 516)):
        tracker = AllocationTracker(torch.device(device))
        tensors = [torch.empty(1, device=device), torch.empty(129, device=device)]
        tracker.count(tensors, "weights")
        assert tracker.num_bytes["weights"] == expected


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize(("optimizer", "table"), [("adamw8bit", 256 * 4), ("AdamWFp8", 0)])
def test_state_in_few_bits_is_counted_as_it_is_kept(optimizer: str, table: int) -> None:
    """A byte a number, a scale for each 256, and a table; a bias of fewer than 4,096 numbers in full."""
    pytest.importorskip("torchao", reason="the extra fp8 installs it")
    found = traced(lambda: nn.Linear(64, 128), (torch.zeros(2, 64),), optimizer=optimizer)
    numbers, bias, steps = 64 * 128, 128, 2 * 4
    assert found.optimizer == 2 * (numbers + numbers // 256 * 4 + table + bias * 4) + steps
