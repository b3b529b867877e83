"""What an editor knows of the calls that every script makes. Pyright reads this file; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather, pad_across_processes, reduce

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from accelerate.accelerator import TypedLoader


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
) -> None:
    # One argument comes back as what it becomes.
    assert_type(accelerator.prepare(model), Model)
    assert_type(accelerator.prepare(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare(scheduler), AcceleratedScheduler)
    assert_type(accelerator.prepare(loader), TypedLoader[Batch])
    assert_type(accelerator.prepare_model(model), Model)
    assert_type(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert_type(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)
    assert_type(accelerator.prepare_data_loader(loader), DataLoader[Batch])
    # Several in the usual order too; elsewhere they keep their types.
    assert_type(accelerator.prepare(model, optimizer), tuple[Model, AcceleratedOptimizer])
    assert_type(accelerator.prepare(model, loader), tuple[Model, TypedLoader[Batch]])
    assert_type(accelerator.prepare(loader, model), tuple[DataLoader[Batch], Model])
    assert_type(
        accelerator.prepare(model, optimizer, loader, loader, scheduler, 1, device_placement=[True] * 6),
        tuple[Model, AcceleratedOptimizer, TypedLoader[Batch], DataLoader[Batch], ConstantLR, int],
    )
    assert_type(accelerator.prepare(model, optimizer, scheduler)[2], ConstantLR)
    assert_type(accelerator.unwrap_model(model), Model)


def usual_loop(accelerator: Accelerator, dataset: TensorDataset, objects: list[Any]) -> None:
    model, evaluation = Model(), DataLoader(dataset)
    optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(dataset)
    scheduler = ConstantLR(optimizer)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    for _ in range(loader.iteration, 3):
        loader.set_epoch(loader.iteration)
        for batch in loader:
            assert_type(batch, tuple[torch.Tensor, ...])
            optimizer.step()
            scheduler.step()
            assert_type(accelerator.gather_for_metrics(batch), tuple[torch.Tensor, ...])
    assert_type(optimizer.num_updates, int)
    assert_type(optimizer.step_was_skipped, bool)
    assert_type(len(loader) + len(evaluation), int)
    assert_type(model.generate(3), list[int])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # prepared objects
    first, *_ = accelerator.prepare(*objects)
    assert_type(first, Any)


def arguments_of_known_types(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, loader: DataLoader[Batch]
) -> None:
    """The variables may have the types of torch."""
    model: torch.nn.Module = Model()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def collectives(accelerator: Accelerator, loss: torch.Tensor, losses: dict[str, torch.Tensor]) -> None:
    assert_type(accelerator.gather(loss), torch.Tensor)
    assert_type(accelerator.reduce(losses, "mean"), dict[str, torch.Tensor])
    assert_type(accelerator.pad_across_processes(loss, dim=1), torch.Tensor)
    assert_type(reduce(losses, reduction="sum"), dict[str, torch.Tensor])
    assert_type(pad_across_processes(loss), torch.Tensor)
    assert_type(gather(loss), torch.Tensor)
    assert_type(accelerator.gather_for_metrics(loss), torch.Tensor)
    assert_type(accelerator.gather_for_metrics(losses), dict[str, torch.Tensor])
    assert_type(accelerator.gather_for_metrics([loss, loss]), list[torch.Tensor])
    assert_type(accelerator.gather_for_metrics((loss, losses)), tuple[torch.Tensor, dict[str, torch.Tensor]])
    assert_type(accelerator.gather_for_metrics(1), Any)  # a list, with one for each rank
    assert_type(accelerator.gather_for_metrics(loss, to="main"), Any)  # None on other ranks
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
