"""What an editor knows of the calls that every script makes. Pyright reads this file; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather, pad_across_processes, reduce

if TYPE_CHECKING:
    from typing_extensions import assert_type

Batch = tuple[torch.Tensor, torch.Tensor]


class Model(torch.nn.Module):
    """A model with a method of its own."""

    def generate(self, length: int) -> list[int]:
        return [0] * length


def prepared_objects(
    accelerator: Accelerator,
    model: Model,
    optimizer: torch.optim.AdamW,
    loader: DataLoader[Batch],
    scheduler: ConstantLR,
    objects: list[Any],
) -> None:
    # One argument comes back as what it becomes.
    assert_type(accelerator.prepare(model), Model)
    assert_type(accelerator.prepare(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare(scheduler), AcceleratedScheduler)
    assert_type(accelerator.prepare(loader), DataLoader[Batch])
    assert_type(accelerator.prepare_model(model), Model)
    assert_type(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)
    assert_type(accelerator.prepare_data_loader(loader), DataLoader[Batch])
    # Several come back usable as what was given: the variables of a loop keep their types.
    model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert_type(accelerator.prepare(loader, model), tuple[DataLoader[Batch], Model])
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(model, optimizer, loader, loader, scheduler)
    assert_type(evaluation, DataLoader[Batch])
    assert_type(
        accelerator.prepare(model, optimizer, loader, loader, scheduler, 1, device_placement=[True] * 6),
        tuple[Model, torch.optim.AdamW, DataLoader[Batch], DataLoader[Batch], ConstantLR, int],
    )
    assert_type(accelerator.prepare(*objects), Any)
    assert_type(model.generate(3), list[int])
    assert_type(accelerator.unwrap_model(model), Model)


def collectives(accelerator: Accelerator, loss: torch.Tensor, losses: dict[str, torch.Tensor]) -> None:
    assert_type(accelerator.gather(loss), torch.Tensor)
    assert_type(accelerator.reduce(losses, "mean"), dict[str, torch.Tensor])
    assert_type(accelerator.pad_across_processes(loss, dim=1), torch.Tensor)
    assert_type(reduce(losses, reduction="sum"), dict[str, torch.Tensor])
    assert_type(pad_across_processes(loss), torch.Tensor)
    assert_type(gather(loss), torch.Tensor)
    accelerator.reduce(loss, "median")  # pyright: ignore[reportArgumentType]


accelerator = Accelerator()
state = PartialState()


@accelerator.on_main_process
def report(loss: float, *, step: int) -> str:
    return f"{step}: {loss}"


@accelerator.on_process(process_index=1)
def report_of_one(loss: float) -> str:
    return f"{loss}"


@state.on_local_main_process
def download(address: str) -> bytes:
    return address.encode()


@find_executable_batch_size
def train(batch_size: int, model: Model) -> float:
    return batch_size / model.generate(1)[0]


@find_executable_batch_size(starting_batch_size=64)
def train_from_64(batch_size: int, model: Model) -> float:
    return batch_size / model.generate(1)[0]


def decorated(model: Model) -> None:
    assert_type(report(0.5, step=1), str | None)
    assert_type(report_of_one(0.5), str | None)
    assert_type(download("name"), bytes | None)
    assert_type(train(model), float)
    assert_type(train_from_64(model), float)
    report("0.5", step=1)  # pyright: ignore[reportArgumentType]
    train(32, model)  # pyright: ignore[reportCallIssue]
