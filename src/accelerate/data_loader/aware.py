"""Loaders that divide their data between ranks by themselves: recognised, so that nothing is divided twice."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from .coverage import BatchCoverage, full_coverage
from .order import samplers_of
from .shard import Account

_COUNTS = ("num_replicas", "world_size")


class AlreadyShardedWarning(UserWarning):
    """A loader divides its data between ranks by itself, and is used as it is."""


def _names_a_rank_of(thing: Any, count: int) -> bool:
    rank = getattr(thing, "rank", None)
    counts = [getattr(thing, name, None) for name in _COUNTS]
    return type(rank) is int and 0 <= rank < count and any(type(one) is int and one == count for one in counts)


def rank_aware_part(dataloader: DataLoader[Any], count: int) -> Any:
    """The sampler or dataset that divides the data of ``dataloader`` between ``count`` ranks; None if nothing does."""
    if count == 1:
        return None
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        # Hugging Face datasets that were split by node keep rank and world_size in a record of their own.
        parts = [dataset, getattr(dataset, "_distributed", None)]
    else:
        parts = samplers_of(dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler)
    return next((part for part in parts if part is not None and _names_a_rank_of(part, count)), None)


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
