"""Gradients equal those of one process that sees the whole batch: ranks x steps x ragged sizes x tails x scaler.

The oracle is float64 autograd over all samples at once; ours is float32, to 1e-6, or float64, to 1e-12.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.plugins.handlers import GradScalerKwargs
from tests.ranks import run_on_ranks
from tests.slow import slow_for

FEATURES = 4


class Announcer:
    """Tells the gradient state which micro-batch is the last, as a prepared loader does."""

    end_of_dataloader = False
    remainder = -1


def model_of(seed: int = 0) -> nn.Module:
    """Two layers with a nonlinearity, the same everywhere."""
    torch.manual_seed(seed)  # float64 models are these, converted: equal bits
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1))


def ragged(ranks: int, micro_batches: int, seed: int) -> list[list[torch.Tensor]]:
    """Samples of every rank and micro-batch; sizes from 0 to 6, not all zero."""
    chosen = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [[chosen.randint(0, 6) for _ in range(micro_batches)] for _ in range(ranks)]
    sizes[0][0] += 1
    return [[torch.randn(size, FEATURES, generator=generator) for size in row] for row in sizes]


def oracle(windows: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradient of the true mean of each window, in float64."""
    gradients = []
    for window in windows:
        model = copy.deepcopy(model_of()).double()
        (model(window.double()) ** 2).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    return gradients


def trained(
    data: list[list[torch.Tensor]], steps: int, precision: str, dtype: torch.dtype = torch.float32
) -> list[list[torch.Tensor]]:
    """Our gradients at every update, on this rank."""
    handlers = [GradScalerKwargs(init_scale=2.0**8)] if precision == "fp16" else None
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision, kwargs_handlers=handlers
    )
    model = model_of().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    mine = [samples.to(dtype) for samples in data[accelerator.process_index]]
    seen = []
    loader = Announcer()
    accelerator.gradient_state._add_dataloader(loader)
    for number, samples in enumerate(mine):
        loader.end_of_dataloader = number + 1 == len(mine)
        with accelerator.accumulate(model):
            accelerator.backward((model(samples) ** 2).sum(), weight=len(samples))
            if accelerator.sync_gradients:
                accelerator.unscale_gradients(optimizer)
                seen.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return seen


def windows_of(data: list[list[torch.Tensor]], steps: int) -> list[torch.Tensor]:
    """Everything that all ranks saw in each window, tail included."""
    count = len(data[0])
    return [
        torch.cat([row[i] for row in data for i in range(start, min(start + steps, count))])
        for start in range(0, count, steps)
    ]


def compare(ours: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], tolerance: float) -> None:
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        for gradient, reference in zip(mine, theirs, strict=True):
            assert torch.allclose(gradient.double(), reference, atol=tolerance, rtol=tolerance), (gradient, reference)


CELLS = [(steps, steps * 2 + tail, seed) for steps in (1, 2, 3, 5, 8) for tail in (0, 1) for seed in (1, 2)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=slow_for("four ranks", "oracle"))])
def test_weighted_gradients_are_those_of_the_full_batch(ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    cases = [(steps, ragged(ranks, count, seed)) for steps, count, seed in CELLS]

    def work() -> list[Any]:
        return [trained(data, steps, "no", dtype) for steps, data in cases]

    answers = [work()] if ranks == 1 else run_on_ranks(work, ranks)
    for answer in answers:
        for (steps, data), ours in zip(cases, answer, strict=True):
            compare(ours, oracle(windows_of(data, steps)), tolerance)


def test_weighted_gradients_pass_through_the_fp16_scaler() -> None:
    data = ragged(2, 5, seed=3)
    for ours in run_on_ranks(trained, 2, data, 2, "fp16"):
        compare(ours, oracle(windows_of(data, 2)), 5e-3)


def plain_mean(data: list[list[torch.Tensor]], steps: int) -> list[list[torch.Tensor]]:
    """The documented form: mean losses, divided by the steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = model_of()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen = []
    for samples in data[accelerator.process_index]:
        with accelerator.accumulate(model):
            accelerator.backward((model(samples) ** 2).mean())
            if accelerator.sync_gradients:
                seen.append([parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 1), (2, 3), (4, 2)])
def test_equal_micro_batches_need_no_weights(ranks: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [[torch.randn(4, FEATURES, generator=generator) for _ in range(steps * 2)] for _ in range(ranks)]
    answers = [plain_mean(data, steps)] if ranks == 1 else run_on_ranks(plain_mean, ranks, data, steps)
    for ours in answers:
        compare(ours, oracle(windows_of(data, steps)), 1e-6)


def adversaries(together: bool) -> list[torch.Tensor]:
    """Two models of one loop: windows of 2 for one and of 3 for the other, or each in a run of its own."""
    results = []
    torch.manual_seed(5)
    inputs = [torch.randn(4, FEATURES) for _ in range(12)]
    accelerators = [Accelerator(cpu=True, gradient_accumulation_steps=steps) for steps in (2, 3)]
    prepared = []
    for number, accelerator in enumerate(accelerators):
        model = model_of(number)
        prepared.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    def turn(number: int, samples: torch.Tensor) -> None:
        accelerator, (model, optimizer) = accelerators[number], prepared[number]
        with accelerator.accumulate(model):
            accelerator.backward((model(samples[accelerator.process_index :: 2]) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()

    if together:
        for samples in inputs:
            turn(0, samples)
            turn(1, samples)
    else:
        for number in (0, 1):
            for samples in inputs:
                turn(number, samples)
    for model, _ in prepared:
        results += [parameter.detach().clone() for parameter in model.parameters()]
    return results


def test_two_models_with_different_windows_train_as_if_alone() -> None:
    together, alone = run_on_ranks(adversaries, 2, True), run_on_ranks(adversaries, 2, False)
    for mine, theirs in zip(together[0], alone[0], strict=True):
        assert torch.equal(mine, theirs)


def turns(alternate: bool) -> list[torch.Tensor]:
    """One Accelerator, two models that take turns in every iteration, windows of 2."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pairs = []
    for seed in (0, 1):
        model = model_of(seed)
        pairs.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    torch.manual_seed(5)
    inputs = [torch.randn(4, FEATURES) for _ in range(6)]
    plan = [(samples, pair) for samples in inputs for pair in pairs]
    if not alternate:
        plan = [(samples, pair) for pair in pairs for samples in inputs]
    for samples, (model, optimizer) in plan:
        with accelerator.accumulate(model):
            accelerator.backward((model(samples) ** 2).sum(), weight=len(samples))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for model, _ in pairs for parameter in model.parameters()]


def test_models_that_take_turns_under_one_accelerator_train_as_if_alone() -> None:
    for mine, theirs in zip(turns(True), turns(False), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("num_micro_batches", [(2, 1), (1, 2), (3, 1)])
def test_a_rank_whose_last_window_is_a_single_micro_batch_gets_the_gradients_of_all(
    num_micro_batches: tuple[int, int],
) -> None:
    samples = ragged(2, max(num_micro_batches), 7)
    data = [
        [torch.cat([one, torch.ones(1, FEATURES)]) for one in row[:n]]
        for row, n in zip(samples, num_micro_batches, strict=True)
    ]
    found = run_on_ranks(trained, 2, data, max(num_micro_batches), "no", torch.float64)
    expected = oracle([torch.cat([one for row in data for one in row])])
    for ours in found:
        compare(ours, expected, 1e-12)
