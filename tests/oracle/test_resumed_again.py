"""A run that is saved and resumed three times in a row reads what the undisturbed run reads, whatever its loader.

Every kind of loader is resumed with new objects from `save_state`, in the middle of an epoch, after one batch more (by
one of two workers), at its last batch and in the next one, on 1, 2 and 4 ranks, read in the process and by two workers.
Streams in persistent workers, whose copies go on from epoch to epoch, are resumed so in the first epoch; in later ones
a warning says that their order may be another. A few kinds in every test run; ``RUN_SLOW=1`` for all.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from accelerate import Accelerator
from accelerate.errors import ResumeWarning
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.oracle.test_resume import Buckets, Lazy, Noted, Shuffled, Stateful, Stream
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

SIZE = 29
EVEN = 32  # where ranks have a part of their own, so that each has equally many batches
EPOCHS = 3


class Rows(Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 0.0])


class Resumable(Sampler):
    """A sampler that can tell where it stands, and begins there."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        while self.position < SIZE:
            self.position += 1
            yield order[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class OfEpoch(Sampler):
    """Batches in an order that `set_epoch` decides."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch).sample(range(SIZE), SIZE)
        return iter([order[start : start + 2] for start in range(0, SIZE, 2)])

    def __len__(self) -> int:
        return -(-SIZE // 2)


class FromIterator(IterableDataset):
    """A stream whose iterator keeps the state, as torchdata allows."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return _Numbers()


class _Numbers:
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> torch.Tensor:
        if self.position == SIZE:
            raise StopIteration
        self.position += 1
        return torch.tensor([float(self.position), 0.0])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Own(IterableDataset):
    """A stream that divides itself: every rank, and every worker of it, has numbers of its own."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def numbers(self) -> range:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return range(EVEN)[self.rank :: self.world_size][index::count]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number), 0.0]) for number in self.numbers())


class OwnStateful(Own):
    """The same with a state of its own."""

    position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = self.numbers()
        while self.position < len(numbers):
            self.position += 1
            yield torch.tensor([float(numbers[self.position - 1]), 0.0])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Files(IterableDataset):
    """A stream of several files, which can be divided by `shard`."""

    def __init__(self, files: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.files = files
        self.num_shards = len(files)

    def shard(self, num_shards: int, index: int) -> Files:
        return type(self)(self.files[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for file in self.files:
            for number in range(EVEN)[file::4]:
                yield torch.tensor([float(number), 0.0])


class StatefulFiles(Files):
    position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = list(super().__iter__())
        while self.position < len(rows):
            self.position += 1
            yield rows[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def divided_sampler() -> DistributedSampler:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return DistributedSampler(Rows(), count, rank, seed=3)


#: From the name of a kind to the dataset, and what says which samples are read.
MAPS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "shuffled": lambda: {"shuffle": True},
    "generator": lambda: {"sampler": RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(3))},
    "seedable": lambda: {"shuffle": True},
    "token budget": lambda: {"shuffle": True},
    "lazy sampler": lambda: {"sampler": Lazy(SIZE)},
    "sampler with state": lambda: {"sampler": Resumable()},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "batches by epoch": lambda: {"batch_sampler": OfEpoch()},
    "batch sampler over a sampler with state": lambda: {"batch_sampler": BatchSampler(Resumable(), 2, False)},
    "divided sampler": lambda: {"sampler": divided_sampler()},
}
STREAMS: dict[str, Callable[[], IterableDataset]] = {
    "stream": partial(Stream, augment=False),
    "shuffled stream": partial(Shuffled, SIZE),
    "stateful stream": partial(Stateful, SIZE),
    "noted stream": partial(Noted, SIZE),
    "iterator with state": FromIterator,
    "divided stream": Own,
    "divided stateful stream": OwnStateful,
    "stream of files": Files,
    "stateful stream of files": StatefulFiles,
}
#: How it is read: by torch's loader, by torchdata's because it is asked for, or because the user's loader is one.
READERS = ["", "stateful", "given stateful", "given and asked stateful", "dispatched", "dispatched stateful"]


def prepared(kind: str, reader: str, num_workers: int) -> tuple[Accelerator, Any]:
    settings: dict[str, Any] = {
        "dispatch_batches": "dispatched" in reader,
        "use_stateful_dataloader": "stateful" in reader and reader != "given stateful",
    }
    keep: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": "persistent" in reader}
    if kind in STREAMS:
        keep.update(dataset=STREAMS[kind](), batch_size=2)
    else:
        keep.update(dataset=Rows(), **MAPS[kind]())
        if "batch_sampler" not in keep:
            keep["batch_size"] = 2
    if kind == "seedable":
        settings["use_seedable_sampler"] = True
    if kind == "token budget":
        settings.update(token_budget=12, length_of=[1 + index % 5 for index in range(SIZE)])
    if "given" in reader:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader: DataLoader = StatefulDataLoader(**keep)
    else:
        loader = DataLoader(**keep)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    return accelerator, accelerator.prepare(loader)


def read(loader: Any, until: int, found: list[list[int]]) -> None:
    """Read on until there are so many batches, or all epochs are over; as a training loop does, with draws between."""
    while loader.iteration < EPOCHS:
        for batch in loader:
            torch.rand(())
            random.random()
            found.append([int(number) for number in batch[:, 0]])
            if len(found) == until:
                return


Case = tuple[str, str, int]


def chains(kind: str, reader: str, num_workers: int, folder: str) -> list[tuple[list[int], int, list[Any], list[Any]]]:
    """The stops of each chain, how many batches are exact, what it read, and what the undisturbed run reads."""
    set_seed(42)
    _, loader = prepared(kind, reader, num_workers)
    expected: list[list[int]] = []
    read(loader, -1, expected)
    length = len(expected) // EPOCHS
    results = []
    stops_of_chains = [[1, 2, length - 1], [length - 1, length, length + 1], [5, 6, 7]]
    if "persistent" in reader:  # also where a worker has begun the next epoch, and another hasn't
        stops_of_chains = [
            [2, length, length + 1],
            [length + 1, length + 2, 2 * length + 1],
            [length + 3, 2 * length, 2 * length + 2],
        ]
    for number, stops in enumerate(stops_of_chains):
        found: list[list[int]] = []
        num_exact = len(expected)  # batches before the first warning
        for run, until in enumerate([*stops, -1]):
            set_seed(42 if run == 0 else 7)
            accelerator, loader = prepared(kind, reader, num_workers)
            if run:
                accelerator.load_state(f"{folder}/{number}/{run}")
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", ResumeWarning)
                read(loader, until, found)
            if "persistent workers" in "".join(str(warning.message) for warning in heard):
                num_exact = min(num_exact, stops[run - 1])
            if until > 0:
                accelerator.save_state(f"{folder}/{number}/{run + 1}")
        results.append((stops, num_exact, found, expected))
    return results


def all_chains(cases: list[Case], folder: str) -> dict[Case, Any]:
    warnings.simplefilter("ignore")
    results: dict[Case, Any] = {}
    for number, case in enumerate(cases):
        results[case] = chains(*case, f"{folder}/{number}")
    return results


def is_possible(kind: str, reader: str) -> bool:
    if kind == "token budget" and "given" in reader:  # torchdata's own batch sampler is the user's
        return False
    if "dispatched" in reader:  # rank 0 reads for all: nothing else may divide the data
        return kind not in ("token budget", "divided sampler", "divided stream", "divided stateful stream")
    return True


#: Cases that are tried in one world, which costs less than a world for each.
GROUPS: dict[str, list[Case]] = {
    f"{reader or 'bare'}, {num_workers} workers, {of}": [
        (kind, reader, num_workers) for kind in kinds if is_possible(kind, reader)
    ]
    for reader in READERS
    for num_workers in (0, 2)
    for of, kinds in (("by index", MAPS), ("streams", STREAMS))
}
if not IS_SLOW:
    GROUPS = {
        "in the process": [
            ("shuffled", "stateful", 0),
            ("batches by epoch", "", 0),
            ("sampler with state", "", 0),
            ("stateful stream", "stateful", 0),
            ("stream", "stateful", 0),
            ("noted stream", "stateful", 0),
            ("noted stream", "dispatched stateful", 0),
            ("divided stateful stream", "stateful", 0),
        ],
    }


GROUPS["in persistent workers"] = [("stateful stream", "stateful, persistent", 2)]
if IS_SLOW:
    GROUPS |= {
        f"{reader}, {of}": [(kind, reader, 2) for kind in kinds if is_possible(kind, reader)]
        for reader in (
            "persistent",
            "stateful, persistent",
            "dispatched, persistent",
            "dispatched stateful, persistent",
        )
        for of, kinds in (("by index", MAPS), ("streams", STREAMS))
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2, 4] if IS_SLOW else [2])
@pytest.mark.parametrize("group", GROUPS)
def test_a_run_resumed_three_times_reads_what_the_undisturbed_run_reads(
    group: str, num_ranks: int, tmp_path: Path, cells: Any
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    cases = GROUPS[group]
    wrong = []
    ranks = run_on_ranks(all_chains, num_ranks, cases, str(tmp_path), timeout_seconds=800)
    for case in cases:
        for chains_of_ranks in zip(*(of_rank[case] for of_rank in ranks), strict=True):
            num_exact = min(
                num for _, num, _, _ in chains_of_ranks
            )  # the rank that reads for all is the one that warns
            for rank, (stops, _, found, expected) in enumerate(chains_of_ranks):
                if found[:num_exact] != expected[:num_exact] or [*map(len, found)] != [*map(len, expected)]:
                    name = f"{case}, rank {rank} of {num_ranks}, stopped after {stops}"
                    wrong.append(f"{name}: {found}, not {expected}, of which {num_exact} are exact")
    cells(f"loaders resumed three times, {num_ranks} ranks", len(cases), max(0, len(cases) - len(wrong)))
    assert not wrong, "\n".join(wrong)
