"""A stream that is divided by rank already is recognised or remarked upon, and never divided again in silence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate import Accelerator
from accelerate.data_loader import AlreadyShardedWarning, BatchSamplerShard, UndividedStreamWarning
from accelerate.errors import PreparationError
from accelerate.utils import DataLoaderConfiguration
from tests.ranks import run_on_ranks

SIZE = 16


class Stream(IterableDataset):
    def __init__(self, numbers: Any = range(SIZE)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class KnowsItsRank(Stream):
    def __init__(self, process_index: int, num_processes: int) -> None:
        super().__init__(range(process_index, SIZE, num_processes))
        self.process_index, self.num_processes = process_index, num_processes


class Wraps(IterableDataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def dataset_of(kind: str, rank: int, count: int) -> Any:
    if kind == "attributes":
        return KnowsItsRank(rank, count)
    if kind == "wrapped":
        return Wraps(Wraps(KnowsItsRank(rank, count)))
    if kind == "data pipe":
        return IterableWrapper(range(SIZE)).sharding_filter().map(int)
    if kind == "split by node":
        import datasets
        from datasets.distributed import split_dataset_by_node

        whole = datasets.Dataset.from_dict({"x": list(range(SIZE))}).to_iterable_dataset(num_shards=4)
        return split_dataset_by_node(whole, rank=rank, world_size=count).map(lambda row: row)
    if kind == "data pipe for all":
        return IterableWrapper(range(SIZE)).map(int)
    return Stream(range(rank, SIZE, count) if kind == "divided" else range(SIZE))


def loaded(
    kind: str, already_sharded: bool | None = None, dispatch_batches: bool | None = None, times: int = 1
) -> tuple[list[int], list[str]]:
    config = DataLoaderConfiguration(already_sharded=already_sharded, dispatch_batches=dispatch_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    rank, count = accelerator.process_index, accelerator.num_processes
    rows: list[int] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(times):
            if kind == "batch sampler":
                whole = torch.utils.data.BatchSampler(range(SIZE), 2, drop_last=False)
                base = DataLoader(range(SIZE), batch_sampler=BatchSamplerShard(whole, count, rank))
            else:
                base = DataLoader(dataset_of(kind, rank, count), 2)
            loader = accelerator.prepare(base)
            rows = []
            for batch in loader:
                values = (batch["x"] if isinstance(batch, dict) else batch).tolist()
                rows += values if loader.own_rows is None else values[: loader.own_rows[0]]
    ours = (AlreadyShardedWarning, UndividedStreamWarning)
    return rows, [one.category.__name__ for one in shown if issubclass(one.category, ours)]


def together(results: list[tuple[list[int], list[str]]]) -> list[int]:
    return sorted(row for rows, _ in results for row in rows)


@pytest.mark.parametrize("kind", ["attributes", "wrapped", "data pipe", "batch sampler", "split by node"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_divided_stream_is_recognised(kind: str, num_processes: int) -> None:
    if kind == "split by node":
        pytest.importorskip("datasets.distributed")  # tests of the seeds put a `datasets` of one file on the path
    results = run_on_ranks(loaded, num_processes, kind)
    assert together(results) == list(range(SIZE))
    assert [said for _, said in results] == ([[]] if num_processes == 1 else [["AlreadyShardedWarning"], []])


@pytest.mark.parametrize("dispatch_batches", [None, False])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_one_option_says_that_a_stream_is_divided(dispatch_batches: bool | None, num_processes: int) -> None:
    results = run_on_ranks(loaded, num_processes, "divided", True, dispatch_batches)
    assert together(results) == list(range(SIZE))
    assert [said for _, said in results] == [[]] * num_processes


@pytest.mark.parametrize("dispatch_batches", [None, False])
def test_what_cant_be_told_is_remarked_upon_once(dispatch_batches: bool | None) -> None:
    results = run_on_ranks(loaded, 2, "whole", None, dispatch_batches, 3)
    assert together(results) == list(range(SIZE))
    assert [said for _, said in results] == [["UndividedStreamWarning"], []]


def test_the_remark_is_silenced_by_saying_that_the_stream_is_whole() -> None:
    results = run_on_ranks(loaded, 2, "whole", False)
    assert together(results) == list(range(SIZE))
    assert [said for _, said in results] == [[], []]


@pytest.mark.parametrize("dispatch_batches", [True, False])
def test_a_data_pipe_that_all_ranks_share_is_divided_once(dispatch_batches: bool) -> None:
    assert together(run_on_ranks(loaded, 2, "data pipe for all", False, dispatch_batches)) == list(range(SIZE))


def test_a_divided_stream_that_rank_0_is_to_read_for_all_is_refused() -> None:
    def ranks() -> str:
        try:
            loaded("divided", True, True)
        except PreparationError as error:
            return str(error)
        return ""

    assert all("already_sharded=True" in text for text in run_on_ranks(ranks))
