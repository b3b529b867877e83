"""The scheduler wrapper: the rate moves when the optimizer did, in the documented or the exact mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accelerate.training.accumulation import GradientState
from accelerate.training.optimizer import AcceleratedOptimizer
from accelerate.training.scheduler import AcceleratedScheduler


class Plugin:
    def __init__(self, **kwargs: Any) -> None:
        self.to_kwargs = lambda: kwargs


@pytest.fixture(autouse=True)
def gradient_state() -> Iterator[GradientState]:
    GradientState._reset_state()
    yield GradientState.create()
    GradientState._reset_state()


def optimizer() -> AcceleratedOptimizer:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return AcceleratedOptimizer(torch.optim.SGD([weight], lr=1.0))


def decay(target: AcceleratedOptimizer, **kwargs: Any) -> AcceleratedScheduler:
    inner = LambdaLR(target.optimizer, lambda count: 0.9**count)
    return AcceleratedScheduler(inner, target, **kwargs)


def rates(scheduler: AcceleratedScheduler, target: AcceleratedOptimizer, calls: int) -> list[float]:
    seen = []
    for _ in range(calls):
        target.step()
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    return seen


def test_the_documented_mode_advances_once_per_process() -> None:
    target = optimizer()
    assert rates(decay(target, num_processes=2), target, 2) == pytest.approx([0.81, 0.6561])


def test_split_batches_keep_the_length_so_one_step_is_one_step() -> None:
    target = optimizer()
    assert rates(decay(target, num_processes=4, split_batches=True), target, 2) == pytest.approx([0.9, 0.81])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_counted_in_updates_the_curve_does_not_depend_on_the_processes(processes: int) -> None:
    target = optimizer()
    assert rates(decay(target, num_processes=processes, mode="updates"), target, 3) == pytest.approx([0.9, 0.81, 0.729])


def test_steps_inside_a_window_do_not_move_the_rate(gradient_state: GradientState) -> None:
    target = optimizer()
    scheduler = decay(target, num_processes=1)
    gradient_state.plugin_kwargs = {"adjust_scheduler": True}
    gradient_state.sync_gradients = False
    count = scheduler.scheduler._step_count
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0] and scheduler.scheduler._step_count == count + 1
    gradient_state.sync_gradients = True
    assert rates(scheduler, target, 1) == pytest.approx([0.9])


def test_a_skipped_update_does_not_move_the_rate() -> None:
    target = optimizer()
    scheduler = decay(target, num_processes=1)
    target._is_overflow = True
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


def test_not_bound_to_the_optimizer_it_steps_as_called(gradient_state: GradientState) -> None:
    target = optimizer()
    scheduler = decay(target, num_processes=8, step_with_optimizer=False)
    gradient_state.sync_gradients = False
    target.optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.9])


def test_one_cycle_stops_at_its_end_instead_of_raising() -> None:
    target = optimizer()
    scheduler = AcceleratedScheduler(OneCycleLR(target.optimizer, max_lr=1.0, total_steps=5), target, num_processes=4)
    rates(scheduler, target, 3)


def test_a_metric_is_one_observation_however_many_processes_made_it() -> None:
    target = optimizer()
    scheduler = AcceleratedScheduler(ReduceLROnPlateau(target.optimizer, patience=1), target, num_processes=8)
    for metric in (1.0, 1.0):
        scheduler.step(metric)
    assert target.param_groups[0]["lr"] == 1.0
    scheduler.step(1.0)
    assert target.param_groups[0]["lr"] == pytest.approx(0.1)


def test_its_state_is_the_inner_schedulers() -> None:
    target = optimizer()
    scheduler = decay(target, num_processes=2)
    rates(scheduler, target, 2)
    other = decay(optimizer(), num_processes=2)
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == scheduler.last_epoch == 4
