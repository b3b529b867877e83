"""Loaders that divide their data between ranks by themselves: recognised, so that nothing is divided twice."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from accelerate.world import current_world

from .coverage import BatchCoverage, full_coverage
from .order import samplers_of
from .shard import Account

_RANKS = ("rank", "process_index", "dp_rank")
_COUNTS = ("num_replicas", "world_size", "num_processes", "dp_world_size")
_INNER = ("dataset", "_datapipe", "source_datapipe", "datapipe")  # where datasets that wrap another one keep it
_DEEPEST = 8

_said: set[str] = set()


class AlreadyShardedWarning(UserWarning):
    """A loader divides its data between ranks by itself, and is used as it is."""


class UndividedStreamWarning(UserWarning):
    """A stream of which it can't be told whether it is divided between ranks already is divided."""


def _names_a_rank_of(thing: Any, count: int) -> bool:
    ranks = [getattr(thing, name, None) for name in _RANKS]
    counts = [getattr(thing, name, None) for name in _COUNTS]
    return any(type(one) is int and 0 <= one < count for one in ranks) and any(
        type(one) is int and one == count for one in counts
    )


def rank_aware_part(dataloader: DataLoader[Any], count: int) -> Any:
    """The sampler or dataset that divides the data of ``dataloader`` between ``count`` ranks; None if nothing does."""
    if count == 1:
        return None
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        parts = _streams_in(dataset)
    else:
        parts = samplers_of(dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler)
    return next((part for part in parts if _names_a_rank_of(part, count) or _is_divided_by_torch(part)), None)


def _streams_in(dataset: Any) -> list[Any]:
    """``dataset``, the datasets that it wraps, and what they say about the ranks that they are divided between."""
    found: list[Any] = []
    while dataset is not None and len(found) < _DEEPEST:
        found.append(dataset)
        # Hugging Face datasets that were split by node keep rank and world_size in a record of their own.
        record = getattr(dataset, "_distributed", None)
        if record is not None:
            found.append(record)
        members = getattr(dataset, "__dict__", {})
        dataset = next((members[name] for name in _INNER if members.get(name) is not None), None)
    return found


def _is_divided_by_torch(part: Any) -> bool:
    """Whether torch's loader itself gives each rank a part of it: data pipes with a sharding filter."""
    return isinstance(part, IterDataPipe) and callable(getattr(part, "apply_sharding", None))


def say_what_is_divided(dataloader: DataLoader[Any], count: int) -> None:
    """Warn once, on rank 0, that a stream is taken to be the same on all ranks."""
    world = current_world()
    dataset: Any = dataloader.dataset
    name = type(dataset).__qualname__
    if count == 1 or not isinstance(dataset, IterableDataset) or name in _said or not (world is None or world.is_main):
        return
    _said.add(name)
    warnings.warn(
        f"The stream {name} is taken to give the same samples on all {count} ranks, and each rank gets its part of "
        "them. If each rank's stream is its own part already, say DataLoaderConfiguration(already_sharded=True), else "
        "samples are lost; already_sharded=False confirms the division and silences this.",
        UndividedStreamWarning,
        stacklevel=4,
    )


def account_of(part: Any, count: int) -> Account:
    """What is known about the batches that ``part`` deals: torch's sampler appends repeated samples at the very end."""
    if type(part) is not DistributedSampler or part.drop_last:
        return lambda num_drawn, size: None

    def account(num_drawn: int, size: int) -> BatchCoverage | None:
        num_samples = len(part.dataset)  # pyright: ignore[reportArgumentType]
        if (num_drawn + size) * count <= num_samples:
            return full_coverage(size, count)
        # The j-th sample of rank r is number r + j * count of the order; those behind the dataset's end repeat.
        real = tuple(min(max(-(-(num_samples - rank) // count) - num_drawn, 0), size) for rank in range(count))
        return BatchCoverage(real, (size,) * count)

    return account
