from __future__ import annotations

import pytest
import torch

from accelerate.local_sgd import LocalSGD
from tests.ranks import run_on_ranks


def _train(num_steps: int, local_sgd_steps: int, enabled: bool) -> list[tuple[float, int]]:
    """The weight after each step, and on each rank a different gradient."""
    from accelerate.accelerator import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights: list[tuple[float, int]] = []
    x = torch.full((1, 1), float(accelerator.process_index + 1))
    with LocalSGD(accelerator, model, local_sgd_steps, enabled=enabled) as local_sgd:
        for _ in range(num_steps):
            accelerator.backward(model(x).sum())  # the gradient is x: 1 on rank 0, 2 on rank 1
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            weights.append((accelerator.unwrap_model(model).weight.item(), local_sgd.num_steps))
    weights.append((accelerator.unwrap_model(model).weight.item(), -1))
    return weights


def test_parameters_are_averaged_every_few_steps_and_at_the_end() -> None:
    first, second = run_on_ranks(_train, 2, 3, 2, True)
    assert [weight for weight, _ in first] == [-1.0, -3.0, -4.0, -4.5]
    assert [weight for weight, _ in second] == [-2.0, -3.0, -5.0, -4.5]


def test_switched_off_every_step_is_synchronised() -> None:
    first, second = run_on_ranks(_train, 2, 2, 2, False)
    assert first == second
    assert [weight for weight, _ in first] == [-1.5, -3.0, -3.0]


def test_one_process_trains_as_without_it() -> None:
    assert [weight for weight, _ in _train(2, 1, True)] == [-1.0, -2.0, -2.0]


def _not_prepared() -> None:
    from accelerate.accelerator import Accelerator

    LocalSGD(Accelerator(cpu=True), torch.nn.Linear(1, 1), 2)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"NotBuilt.*accelerator\.prepare"):
        run_on_ranks(_not_prepared, 2)
