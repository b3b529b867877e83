"""Scripts that call ``set_epoch`` of their own sampler or dataset read what torch's loop reads, in any epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks

SIZE = 16
CPU = torch.device("cpu")


class Epoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Samples(Epoch, Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def __len__(self) -> int:
        return SIZE


class Counting(Samples):
    """A sampler that counts its epochs itself, as soon as one begins."""

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        self.epoch += 1
        return iter(order)


class Batches(Epoch, Sampler):
    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        return iter([order[start : start + 2] for start in range(0, SIZE, 2)])

    def __len__(self) -> int:
        return SIZE // 2


class Stream(Epoch, IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


@dataclass
class Table(Epoch, Dataset):
    """A dataset without a hash, as a dataclass is."""

    size: int = SIZE

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return self.order()[index]


def made(kind: str) -> tuple[DataLoader[Any], Any]:
    """Return a loader of this kind, and what listens to the epoch."""
    if kind == "sampler":
        return DataLoader(Table(), batch_size=2, sampler=(sampler := Samples())), sampler
    if kind == "batch sampler":
        return DataLoader(Table(), batch_sampler=(sampler := Batches())), sampler
    if kind == "torch's own":
        sampler = DistributedSampler(Table(), 1, 0)
        return DataLoader(Table(), batch_size=2, sampler=sampler), sampler
    dataset = Stream() if kind == "stream" else Table()
    return DataLoader(dataset, batch_size=2), dataset


def samples(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


KINDS = ["sampler", "batch sampler", "torch's own", "stream", "table"]


def passes(loader: Any, listener: Any, skipped: int | None) -> list[list[int]]:
    """Read epochs 3 to 5 of a script that goes on from a checkpoint of its own, then epoch 1."""
    first = loader if skipped is None else skip_first_batches(loader, skipped)
    read = []
    for epoch, one in ((3, first), (4, loader), (5, loader), (1, loader)):
        listener.set_epoch(epoch)
        read.append(samples(one))
    return read


@pytest.mark.parametrize("skipped", [None, 0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_the_script_sets_itself_is_read(kind: str, skipped: int | None) -> None:
    expected = passes(*made(kind), skipped)
    loader, listener = made(kind)
    prepared = prepare_data_loader(loader, CPU, 1, 0)
    assert passes(prepared, listener, skipped) == expected
    samples(prepared)
    assert listener.epoch == 2  # the loader counts on from there


def along_ranks(kind: str, skipped: int | None, dispatches: bool) -> list[list[int]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader, listener = made(kind)
    return passes(accelerator.prepare(loader), listener, skipped)


@pytest.mark.parametrize("dispatches", [False, True])
@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream", "table"])
def test_it_is_read_on_two_ranks(kind: str, dispatches: bool) -> None:
    expected = passes(*made(kind), 0)
    first, second = run_on_ranks(along_ranks, 2, kind, 0, dispatches)
    for epoch, one, other in zip(expected, first, second, strict=True):
        assert sorted(one + other) == sorted(epoch) and set(one).isdisjoint(other)
        assert one[:2] == epoch[:2]  # rank 0 begins with the epoch's first batch


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_position_knows_its_epoch(kind: str) -> None:
    """The sampler's state may be restored, or set by the script, beside the position."""
    loader, _ = made(kind)
    whole = prepare_data_loader(loader, CPU, 1, 0)
    for _ in range(2):
        samples(whole)
    iterator = iter(whole)
    read = [next(iterator).tolist() for _ in range(3)]
    inside = whole.state_dict()
    rest = [batch.tolist() for batch in iterator]
    after, following = whole.state_dict(), samples(whole)
    assert len(read) + len(rest) == SIZE // 2

    for state, epoch, expected in ((inside, 7, [sample for batch in rest for sample in batch]), (after, 2, following)):
        loader, listener = made(kind)
        resumed = prepare_data_loader(loader, CPU, 1, 0)
        resumed.load_state_dict(state)
        listener.set_epoch(epoch)
        assert samples(resumed) == expected


def test_two_loaders_over_one_dataset_leave_each_others_epoch() -> None:
    dataset = Table()
    training, evaluation = (prepare_data_loader(DataLoader(dataset, batch_size=2), CPU, 1, 0) for _ in range(2))
    shown = []
    for epoch in range(3):
        samples(training)
        shown.append((training.iteration, dataset.epoch))
        if epoch:
            samples(evaluation)
    assert shown == [(1, 0), (2, 1), (3, 2)]


def test_an_epoch_that_is_left_begins_again_also_where_the_sampler_counts_itself() -> None:
    loader: Any = prepare_data_loader(DataLoader(Table(), batch_size=2, sampler=Counting()), CPU, 1, 0)
    next(iter(loader))
    assert loader.iteration == 0
    samples(loader)
    assert loader.iteration == 1
