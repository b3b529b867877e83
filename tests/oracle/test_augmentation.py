"""With ``augment_by_sample`` a sample of an epoch is augmented alike, whoever reads it and whatever was read before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.distributed.random import capture_host_streams, capture_rng_states, restore_rng_states, set_seed
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

CPU = torch.device("cpu")
SIZE = 29
EPOCHS = 2
Row = tuple[float, ...]


class Augmented(Dataset):
    """Rows of a number and a draw from each of the three streams."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class ReadsWholeBatches(Augmented):
    """The same rows, several at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Uneven(Sampler):
    """Batches of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        yield from (order[start : start + 1 + start % 3] for start in range(0, SIZE, 3))

    def __len__(self) -> int:
        return len(range(0, SIZE, 3))


def prepared(kind: str, index: int, count: int, num_workers: int, batch_size: int = 12) -> Any:
    """One share of a loader; all shares together take ``batch_size`` samples at once."""
    dataset = ReadsWholeBatches() if kind == "reads whole batches" else Augmented()
    options: dict[str, Any] = {}
    arguments: dict[str, Any] = {"batch_size": batch_size // count, "shuffle": True}
    if kind == "split":
        arguments["batch_size"], options["split_batches"] = batch_size, True
    elif kind == "uneven batches":
        arguments = {"batch_sampler": Uneven()}
    elif kind == "no batches":
        arguments["batch_size"] = None
    elif kind == "replacement":
        arguments.update(shuffle=False, sampler=RandomSampler(dataset, replacement=True, num_samples=60))
    elif kind == "distributed sampler":
        arguments.update(shuffle=False, sampler=DistributedSampler(dataset, count, index, seed=1))
    elif kind == "index-free":
        options["index_free_shuffle"] = True
    loader = DataLoader(dataset, num_workers=num_workers, **arguments)
    return prepare_data_loader(loader, CPU, count, index, augment_by_sample=True, rng_types=[], **options)


def rows_of(loader: Any, kind: str, stop_after: int | None = None) -> list[Row]:
    """The real rows of the rest of this run, each with its epoch."""
    rows: list[Row] = []
    while loader.iteration < EPOCHS:
        for number, batch in enumerate(loader, 1):
            batch = batch[None] if kind == "no batches" else batch
            real = batch if loader.own_rows is None else batch[: loader.own_rows[0]]
            rows += [(float(loader.iteration), *row) for row in real.tolist()]
            if number == stop_after:
                return rows
    return rows


READ_DIFFERENTLY = ["plain", "reads whole batches", "no batches"]
KINDS = [*READ_DIFFERENTLY, "split", "uneven batches", "replacement", "index-free"]


@pytest.mark.filterwarnings("ignore::accelerate.data_loader.AlreadyShardedWarning")
@pytest.mark.parametrize("kind", [*KINDS, "distributed sampler"])
def test_any_number_of_ranks_and_workers_reads_the_same_rows(kind: str, cells: Any) -> None:
    def everything(count: int, num_workers: int, batch_size: int = 12) -> list[Row]:
        rows: list[Row] = []
        for index in range(count):
            set_seed(3)
            rows += rows_of(prepared(kind, index, count, num_workers, batch_size), kind)
        return sorted(rows)

    expected = everything(1, 0)
    assert len(set(expected)) == len(expected), "every sample of every epoch has its own augmentation"
    with_workers = [(1, 2), (2, 2), (4, 1)] if IS_SLOW else [(2, 2)] if kind in READ_DIFFERENTLY else []
    found = [everything(*which) for which in [(2, 0), (4, 0), (2, 0, 8), *with_workers]]
    right = sum(rows == expected for rows in found)
    cells(f"augmented rows on other ranks and workers: {kind}", len(found), right)
    assert right == len(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("saved_on", "continued_on"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 3)] if IS_SLOW else [(1, 2), (4, 2)]
)
def test_a_run_goes_on_with_the_same_rows_on_any_number_of_ranks(kind: str, saved_on: int, continued_on: int) -> None:
    if kind == "split" and continued_on == 3:
        pytest.skip("12 samples in 2 equal parts are another order than 12 in 3")
    set_seed(3)
    expected = sorted(rows_of(prepared(kind, 0, 1, 0), kind))
    rows: list[Row] = []
    states = []
    for index in range(saved_on):
        set_seed(3)
        loader = prepared(kind, index, saved_on, 0)
        rows += rows_of(loader, kind, stop_after=2)
        states.append((loader.state_dict(), capture_rng_states()))
    for index in range(continued_on):
        set_seed(8)  # another process: only the checkpoint knows the seed
        loader = prepared(kind, index, continued_on, index % 2)
        loader.load_state_dict(states[0][0])
        assert restore_rng_states(states[0][1]) == []
        rows += rows_of(loader, kind)
    assert sorted(rows) == expected


def test_reading_doesnt_move_the_streams_of_the_training_loop() -> None:
    loader = prepared("plain", 0, 1, 0)
    batches = iter(loader)
    next(batches)  # torch draws a seed when a loop begins, workers or none
    before = capture_host_streams()
    list(batches)
    after = capture_host_streams()
    assert after["python"] == before["python"] and after["numpy"] == before["numpy"]
    assert torch.equal(after["torch"], before["torch"])


def test_an_error_while_reading_doesnt_move_them_either() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise OSError("row 5")
            return super().__getitem__(index)

    loader = prepare_data_loader(DataLoader(Broken(), batch_size=4), augment_by_sample=True)
    batches = iter(loader)
    next(batches)
    before = random.getstate()
    with pytest.raises(OSError, match="row 5"):
        next(batches)
    assert random.getstate() == before


# -- real ranks --------------------------------------------------------------------------------------------


def run(
    num_workers: int,
    dispatch: bool = False,
    folder: str | None = None,
    stop_after: int | None = None,
    goes_on: bool = False,
) -> tuple[list[Row], list[float]]:
    """The real rows and the losses, averaged over the ranks, of a training run with 12 samples to an update."""
    config = DataLoaderConfiguration(augment_by_sample=True, use_seedable_sampler=True, dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config, scheduler_mode="updates")
    set_seed(4)
    model = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(
        Augmented(), 12 // accelerator.num_processes, shuffle=True, drop_last=True, num_workers=num_workers
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if goes_on:
        accelerator.load_state(folder)
    rows: list[Row] = []
    losses: list[float] = []
    while loader.iteration < EPOCHS:
        for batch in loader:
            rows += [(float(loader.iteration), *row) for row in batch.tolist()]
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == stop_after:
                accelerator.save_state(folder)
                return rows, losses
    return rows, losses


def together(results: list[tuple[list[Row], list[float]]]) -> tuple[list[Row], list[float]]:
    assert all(losses == results[0][1] for _, losses in results)
    return sorted(row for rows, _ in results for row in rows), results[0][1]


def test_one_two_and_four_ranks_train_the_same_run(cells: Any) -> None:
    rows, losses = together(run_on_ranks(run, 1, 0))
    assert len(losses) == 2 * EPOCHS
    tried = [(2, 2, False), (2, 0, True), (4, 0, False)]
    if IS_SLOW:
        tried += [(1, 2, False), (2, 0, False), (4, 2, False), (4, 2, True)]
    right = 0
    for num_ranks, *how in tried:
        found = together(run_on_ranks(run, num_ranks, *how))
        assert found[0] == rows, (num_ranks, how)  # bit for bit
        np.testing.assert_allclose(found[1], losses, rtol=1e-12)
        right += 1
    cells("training runs on other ranks and workers", len(tried), right)


@pytest.mark.parametrize(("saved_on", "continued_on"), [(1, 2), (4, 2), (2, 1)] if IS_SLOW else [(4, 2)])
def test_a_run_that_goes_on_on_other_ranks_is_the_same_run(saved_on: int, continued_on: int, tmp_path: Path) -> None:
    rows, losses = together(run_on_ranks(run, 1, 0))
    folder = str(tmp_path / "saved")
    before = together(run_on_ranks(run, saved_on, 0, False, folder, 1))
    after = together(run_on_ranks(run, continued_on, 1, False, folder, None, True))
    assert sorted(before[0] + after[0]) == rows
    np.testing.assert_allclose(before[1] + after[1], losses, rtol=1e-12)
