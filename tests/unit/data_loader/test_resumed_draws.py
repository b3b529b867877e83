"""A run resumed inside an epoch draws what the uninterrupted run would have drawn, or a remark says that it doesn't.

The table: how the loader reads, its workers, who draws (the dataset, or a sampler while the epoch runs) from which
random numbers, and after which batch of which epoch the run was saved.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from accelerate.data_loader import prepare_data_loader
from accelerate.distributed.random import capture_rng_states, host_stream, restore_rng_states, set_seed
from accelerate.errors import ResumeWarning
from tests.slow import mostly_slow

SIZE, BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS = 60, 3, 8, 2
#: A number below SIZE from each of the global streams.
DRAWS: dict[str, Callable[[], int]] = {
    "python": lambda: random.randrange(SIZE),
    "numpy": lambda: int(np.random.randint(SIZE)),
    "torch": lambda: int(torch.randint(SIZE, ())),
}


class Numbers(Dataset):
    """The index of each sample and, if asked for, a draw from each of the global streams."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *([draw() for draw in DRAWS.values()] if self.draws else ())])

    def __len__(self) -> int:
        return SIZE


class Lazy(Sampler[Any]):
    """Draws each index, or each batch of them, when it is asked for, and once more at its end."""

    def __init__(self, source: str, is_batched: bool) -> None:
        self.generator = torch.Generator().manual_seed(3) if source == "generator" else None
        self.hidden = torch.Generator().manual_seed(3)
        self.draw, self.is_batched = DRAWS.get(source, self._own), is_batched

    def _own(self) -> int:
        return int(torch.randint(SIZE, (), generator=self.generator or self.hidden))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield [self.draw() for _ in range(BATCH_SIZE)] if self.is_batched else self.draw()
        self.draw()

    def __len__(self) -> int:
        return NUM_BATCHES if self.is_batched else NUM_BATCHES * BATCH_SIZE


class CopiesAhead:
    """Batches are taken from the workers before they are used, as copies to a device are."""

    def send(self, batch: object) -> object:
        return batch

    def receive(self, sent: object) -> object:
        return sent


WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "one worker": {"num_workers": 1, "prefetch_factor": 3},
}
READERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "torchdata": {"use_stateful_dataloader": True},
    "second of two ranks": {"num_processes": 2, "process_index": 1},
    "dispatched": {"dispatch_batches": True, "put_on_device": True},
    "copied ahead": {"prefetch_to_device": 2, "put_on_device": True},
}


def prepared(reader: str, workers: str, source: str) -> Any:
    kind, _, form = source.partition(" per ")
    sampling: dict[str, Any] = {"shuffle": True, "batch_size": BATCH_SIZE}
    if form == "batch":
        sampling = {"batch_sampler": Lazy(kind, True)}
    elif form == "sample":
        sampling = {"sampler": Lazy(kind, False), "batch_size": BATCH_SIZE}
    loader = DataLoader(Numbers(draws=not form), **sampling, **WORKERS[workers])
    found = prepare_data_loader(
        loader, torch.device("cpu"), **{"num_processes": 1, "process_index": 0, **READERS[reader]}
    )
    if reader == "copied ahead":
        found.device_prefetch = CopiesAhead()
    return found


def read(loader: Any, of_loop: list[Callable[[], int]], saves: dict[Any, Any] | None = None) -> list[Any]:
    """Read the epochs that are left, with draws of the loop after each batch; note what a save there would hold."""
    trace: list[Any] = []
    while loader.iteration < NUM_EPOCHS:
        epoch = loader.iteration
        for number, batch in enumerate(loader):
            trace.append((batch.tolist(), [draw() for draw in of_loop]))
            if saves is not None:
                saves[epoch, number] = (len(trace), loader.position_state(), capture_rng_states())
    trace += [host_stream(name) for name in ("python", "numpy")]
    return [*trace, host_stream("torch").tolist()]  # from which the next epoch begins


#: For each place of a save: whether the resumed run was equal, and how often it warned.
Found = dict[tuple[int, int], tuple[bool, int]]


def resumed(
    reader: str, workers: str, source: str, of_loop: list[Callable[[], int]], stops: list[tuple[int, int]]
) -> Found:
    if reader == "torchdata":
        pytest.importorskip("torchdata")
    set_seed(42)
    saves: dict[Any, Any] = {}
    whole = read(prepared(reader, workers, source), of_loop, saves)
    found: Found = {}
    for stop in stops:
        length, position, streams = saves[stop]
        set_seed(7)  # a new process
        loader = prepared(reader, workers, source)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loader.load_state_dict(position)
            restore_rng_states(streams)
            rest = read(loader, of_loop)
        found[stop] = rest == whole[length:], sum(one.category is ResumeWarning for one in heard)
    return found


def table(*columns: list[str]) -> list[str]:
    rows = [""]
    for column in columns:
        rows = [f"{row}, {one}" if row else one for row in rows for one in column]
    return rows


QUICK = ["torchdata, workers", *table(list(READERS), ["no workers"])]


@pytest.mark.parametrize(
    "case", mostly_slow(table(list(READERS), ["no workers", "workers", "persistent workers"]), QUICK)
)
def test_datasets_draw_what_they_would_have_drawn(case: str) -> None:
    stops = [(0, 1), (1, 0), (1, 1)]
    reader, workers = case.split(", ")
    found = resumed(reader, workers, "dataset", list(DRAWS.values()), stops)
    assert found == dict.fromkeys(stops, (True, 0))


SOURCES = table([f"{name} per {one}" for name in (*DRAWS, "generator") for one in ("sample", "batch")])
QUICK = [
    *table(list(READERS), ["no workers"], SOURCES),
    "torch, one worker, python per batch",
    "torch, one worker, numpy per sample",
    "torch, persistent workers, torch per batch",
    "torchdata, one worker, torch per sample",
    "second of two ranks, one worker, python per sample",
    "dispatched, one worker, python per batch",
    "copied ahead, one worker, python per batch",
]


@pytest.mark.parametrize(
    "case", mostly_slow(table(list(READERS), ["no workers", "one worker", "persistent workers"], SOURCES), QUICK)
)
def test_samplers_draw_what_they_would_have_drawn(case: str) -> None:
    reader, workers, source = case.split(", ")
    stops = [(0, 2), (1, 0), (1, 2)]
    others = [draw for name, draw in DRAWS.items() if name not in source]
    assert resumed(reader, workers, source, others, stops) == dict.fromkeys(stops, (True, 0))


MIXED = [f"{name} per {one}" for name in (*DRAWS, "hidden") for one in ("sample", "batch")]
QUICK = [*table(["no workers"], MIXED), "one worker, python per batch"]


@pytest.mark.parametrize("case", mostly_slow(table(["no workers", "one worker"], MIXED), QUICK))
def test_among_draws_of_the_loop_they_are_equal_or_there_is_one_remark(case: str) -> None:
    workers, source = case.split(", ")
    of_loop = [draw for name, draw in DRAWS.items() if name in source]
    found = resumed("torch", workers, source, of_loop, [(0, 0), (0, 1), (0, 5), (1, 1)])
    assert set(found.values()) == {(True, 0), (False, 1)}, found
