"""Every sample of an evaluation reaches the metric exactly once, on 1, 2 and 4 real ranks, whatever the loop does.

Each run goes through a grid of loaders; a cell is right when what ``gather_for_metrics`` returned, joined over the
loop, is what a loop over the bare loader in one process sees. ``RUN_SLOW=1`` goes through many more sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

SIZES = tuple(range(41)) if IS_SLOW else (0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 23)
BATCHES = (1, 2, 3, 4, 5, 8) if IS_SLOW else (1, 3, 4)
WORLDS = (1, 2, 3, 4) if IS_SLOW else (1, 2)


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Buckets(Sampler):
    """Batches of varying size, shuffled."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        cuts = [list(range(start, min(start + 1 + start % 3, self.size))) for start in range(0, self.size, 3)]
        random.shuffle(cuts)
        yield from cuts

    def __len__(self) -> int:
        return -(-self.size // 3)


def kinds(size: int, batch: int, drop_last: bool, num_ranks: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, loader and settings of every way to read ``size`` samples."""
    split = {"split_batches": True}
    dispatch = {"dispatch_batches": True}
    keep: dict[str, Any] = {"batch_size": batch, "drop_last": drop_last}
    whole: dict[str, Any] = {"batch_size": batch * num_ranks, "drop_last": drop_last}
    yield "map", DataLoader(range(size), shuffle=size > 0, **keep), {}
    yield "stream", DataLoader(Stream(size), **keep), {"dispatch_batches": False}
    yield "dispatched map", DataLoader(range(size), shuffle=size > 0, **keep), dispatch
    yield "dispatched stream", DataLoader(Stream(size), **keep), {}
    yield "split map", DataLoader(range(size), **whole), split
    yield "split stream", DataLoader(Stream(size), **whole), {**split, "dispatch_batches": False}
    yield "split dispatched", DataLoader(Stream(size), **whole), {**split, **dispatch}
    yield "batch sampler", DataLoader(range(size), batch_sampler=BatchSampler(range(size), batch, drop_last)), {}
    yield "index-free map", DataLoader(range(size), shuffle=size > 0, **keep), {"index_free_shuffle": True}
    yield "uneven map", DataLoader(range(size), shuffle=size > 0, **keep), {"even_batches": False}
    yield "uneven split map", DataLoader(range(size), **whole), {**split, "even_batches": False}
    if not drop_last:
        yield "no batches", DataLoader(torch.arange(size), batch_size=None), {}
        sampler = BatchSampler(SequentialSampler(range(size)), batch, False)
        yield "sampler of batches", DataLoader(torch.arange(size), sampler=sampler, batch_size=None), {}


def promised(name: str, size: int, batch: int, drop_last: bool, num_ranks: int) -> int:
    """How many of ``size`` samples the documented policy evaluates."""
    if not drop_last:
        return size
    return size - size % (batch * num_ranks)


def prepared(accelerator: Accelerator, loader: Any, settings: dict[str, Any]) -> Any:
    accelerator.dataloader_config = DataLoaderConfiguration(**settings)
    return accelerator.prepare_data_loader(loader)


def ids(values: Any) -> list[int]:
    return values.reshape(-1).tolist()


def grid() -> dict[str, list[int]]:
    """Per kind of loader: cells tried, cells right."""
    accelerator = Accelerator(cpu=True)
    table: dict[str, list[int]] = {}
    for size in SIZES:
        for batch in BATCHES:
            for drop_last in (False, True):
                for name, loader, settings in kinds(size, batch, drop_last, accelerator.num_processes):
                    loader = prepared(accelerator, loader, settings)
                    found: list[int] = []
                    for values in loader:
                        # Ranks with different numbers of batches can't gather batch by batch.
                        found += ids(values if "uneven" in name else accelerator.gather_for_metrics(values))
                    if "uneven" in name:
                        found = accelerator.gather_for_metrics(found, use_gather_object=True)
                    num_promised = promised(name, size, batch, drop_last, accelerator.num_processes)
                    is_right = len(found) == len(set(found)) == num_promised and set(found) <= set(range(size))
                    cell = table.setdefault(name, [0, 0])
                    cell[0] += 1
                    cell[1] += is_right
                    if not is_right:
                        table.setdefault(f"wrong: {name} {size=} {batch=} {drop_last=} {sorted(found)}", [0, 0])
    return table


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_each_sample_is_evaluated_once_whatever_reads_it(num_ranks: int, cells: Any) -> None:
    tables = run_on_ranks(grid, num_ranks, timeout_seconds=600)
    assert all(table == tables[0] for table in tables)
    for name, (tried, right) in tables[0].items():
        if tried:
            cells(f"{name}, {num_ranks} ranks", tried, right)
    assert not [name for name in tables[0] if name.startswith("wrong")]


# -- whatever the loop does --------------------------------------------------------------------------------


def check(loop: Callable[[Accelerator], tuple[Any, Any]], num_ranks: int) -> None:
    for found, expected in run_on_ranks(lambda: loop(Accelerator(cpu=True)), num_ranks):
        assert found == expected


def leaves_early(accelerator: Accelerator) -> tuple[Any, Any]:
    loader = prepared(accelerator, DataLoader(range(11), batch_size=2), {})
    first: list[int] = []
    for values in loader:
        first += ids(accelerator.gather_for_metrics(values))
        break
    whole = [sample for values in loader for sample in ids(accelerator.gather_for_metrics(values))]
    return (sorted(first), sorted(whole)), (list(range(2 * accelerator.num_processes)), list(range(11)))


def interleaves(accelerator: Accelerator) -> tuple[Any, Any]:
    first = prepared(accelerator, DataLoader(range(11), batch_size=2), {})
    second = prepared(accelerator, DataLoader(range(11, 18), batch_size=2), {})
    found: list[list[int]] = [[], []]
    running = [iter(first), iter(second)]
    alive = [True, True]
    while any(alive):
        for number, batches in enumerate(running):
            values = next(batches, None)
            alive[number] = values is not None
            if values is not None:
                found[number] += ids(accelerator.gather_for_metrics(values))
    return [sorted(one) for one in found], [list(range(11)), list(range(11, 18))]


def evaluates_inside_training(accelerator: Accelerator) -> tuple[Any, Any]:
    training = prepared(accelerator, DataLoader(range(11), batch_size=2), {})
    evaluation = prepared(accelerator, DataLoader(range(5), batch_size=2), {})
    seen, evaluated = [], []
    for values in training:
        inner = [sample for held in evaluation for sample in ids(accelerator.gather_for_metrics(held))]
        evaluated.append(sorted(inner) == list(range(5)))
        seen += ids(accelerator.gather_for_metrics(values))
    return (sorted(seen), all(evaluated)), (list(range(11)), True)


def skips(accelerator: Accelerator) -> tuple[Any, Any]:
    skipped = 2 * accelerator.num_processes
    found = []
    for dataset in (range(19), Stream(19)):
        loader = prepared(accelerator, DataLoader(dataset, batch_size=2), {"dispatch_batches": False})
        loader = skip_first_batches(loader, 1)
        found.append(sorted(sample for values in loader for sample in ids(accelerator.gather_for_metrics(values))))
    return found, [list(range(skipped, 19))] * 2


def returns_nested_outputs(accelerator: Accelerator) -> tuple[Any, Any]:
    loader = prepared(accelerator, DataLoader(range(11), batch_size=4), {})
    found: dict[str, list[Any]] = {"ids": [], "pair": [], "rows": []}
    for values in loader:
        outputs = {"ids": values, "pair": (values, [values + 100]), "rows": values.repeat_interleave(3)}
        outputs = accelerator.gather_for_metrics(outputs)
        found["ids"] += ids(outputs["ids"])
        found["pair"] += ids(outputs["pair"][1][0])
        found["rows"] += ids(outputs["rows"])
    expected = list(range(11))
    return found, {
        "ids": expected,
        "pair": [sample + 100 for sample in expected],
        "rows": [sample for sample in expected for _ in range(3)],
    }


def returns_objects(accelerator: Accelerator) -> tuple[Any, Any]:
    loader = prepared(accelerator, DataLoader(range(11), batch_size=4), {})
    found: list[str] = []
    for values in loader:
        found += accelerator.gather_for_metrics(
            [f"sample {value}" for value in values.tolist()], use_gather_object=True
        )
    return found, [f"sample {number}" for number in range(11)]


def has_varying_batches(accelerator: Accelerator) -> tuple[Any, Any]:
    random.seed(accelerator.process_index)
    loader = prepared(accelerator, DataLoader(range(17), batch_sampler=Buckets(17)), {})
    found: list[int] = []
    for values in loader:
        padded = accelerator.pad_across_processes(values, pad_index=-1)
        found += ids(accelerator.gather_for_metrics(padded))
    expected = sorted(sample for cut in Buckets(17) for sample in cut)
    return sorted(sample for sample in found if sample >= 0), expected


def reads_with_workers(accelerator: Accelerator) -> tuple[Any, Any]:
    found = []
    for dataset, workers in ((range(19), 2), (Stream(19), 1)):
        loader = DataLoader(dataset, batch_size=2, num_workers=workers)
        loader = prepared(accelerator, loader, {"dispatch_batches": False})
        found.append(sorted(sample for values in loader for sample in ids(accelerator.gather_for_metrics(values))))
    return found, [list(range(19))] * 2


LOOPS = [
    leaves_early,
    interleaves,
    evaluates_inside_training,
    skips,
    returns_nested_outputs,
    returns_objects,
    has_varying_batches,
    reads_with_workers,
]


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_each_sample_is_evaluated_once_by_a_loop_that(loop: Any, num_ranks: int) -> None:
    check(loop, num_ranks)
