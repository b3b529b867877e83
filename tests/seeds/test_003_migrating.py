"""The documentation page on migrating a script."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks

row = pytest.mark.row


def four() -> list[Any]:
    """A model, its optimizer, a dataloader and a scheduler."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    return [model, optimizer, loader, ExponentialLR(optimizer, gamma=0.9)]


KINDS = [nn.Module, torch.optim.Optimizer, DataLoader, object]


@row("003-01")
@pytest.mark.parametrize(("split_batches", "rate"), [(False, 0.81), (True, 0.9)])
def test_one_call_of_the_scheduler_stands_for_all_processes(split_batches: bool, rate: float) -> None:
    def learning_rate() -> float:
        configuration = DataLoaderConfiguration(split_batches=split_batches)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        model, optimizer, _, scheduler = accelerator.prepare(*four())
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()[0]

    assert run_on_ranks(learning_rate, 2) == [pytest.approx(rate)] * 2
    assert learning_rate() == pytest.approx(0.9)


@row("003-04", "003-05")
def test_four_objects_come_back_in_their_order_whatever_it_is() -> None:
    for order in itertools.permutations(range(4)):
        objects = four()
        out = Accelerator(cpu=True).prepare(*[objects[i] for i in order])
        assert all(isinstance(out[place], KINDS[i]) for place, i in enumerate(order))
        scheduler = out[order.index(3)]
        assert not isinstance(scheduler, (nn.Module, torch.optim.Optimizer, DataLoader))
        assert scheduler.get_last_lr() == [1.0]


@row("003-06")
@pytest.mark.usefixtures("fake_device")
def test_placement_can_be_left_out_for_all_or_for_one() -> None:
    placed = Accelerator().prepare(nn.Linear(1, 1))
    assert placed.weight.device.type == "meta"
    kept = Accelerator(device_placement=False).prepare(nn.Linear(1, 1))
    assert kept.weight.device.type == "cpu"
    first, second = Accelerator().prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True, False])
    assert (first.weight.device.type, second.weight.device.type) == ("meta", "cpu")


class LooksLikeAnOptimizer:
    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@row("003-08")
@pytest.mark.parametrize("thing", ["a word", 3, None, LooksLikeAnOptimizer(), [1, 2], torch.ones(1)])
def test_what_is_no_torch_class_is_returned_as_it_is(thing: Any) -> None:
    assert Accelerator(cpu=True).prepare(thing) is thing


@row("003-12")
def test_a_model_moved_before_prepare_keeps_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to(accelerator.device)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))


@row("003-13")
def test_every_strategy_is_reached_from_the_constructor() -> None:
    names = inspect.signature(Accelerator.__init__).parameters
    for name in (
        "cpu", "mixed_precision", "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin",
        "parallelism_config", "dynamo_backend", "dynamo_plugin", "kwargs_handlers", "gradient_accumulation_plugin",
    ):  # fmt: skip
        assert name in names
    assert list(names)[1] == "device_placement"


def test_the_scheduler_is_a_torch_scheduler_or_says_where_it_is() -> None:
    *_, scheduler = Accelerator(cpu=True).prepare(*four())
    assert isinstance(scheduler.scheduler, LRScheduler)
