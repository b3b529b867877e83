"""Prepared loaders: sharding over ranks, padding and valid rows, resume positions, prefetch, gathering of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ResumeWarning
from ..lazy import names_from

if TYPE_CHECKING:
    from .adapter import DataLoaderAdapter, DataLoaderStateMixin
    from .dispatch import DataLoaderDispatcher
    from .iterable import AlreadyShardedWarning, UndividedStreamWarning
    from .loader import DataLoaderShard, PreparedLoader, get_sampler
    from .prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
    from .sampling import BatchCoverage, IndexFreeSampler, SeedableRandomSampler, SkipBatchSampler
    from .sharding import BatchSamplerShard, IterableDatasetShard
    from .token_batches import TokenBatchSampler

__all__ = [
    "AlreadyShardedWarning",
    "BatchCoverage",
    "PreparedLoader",
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IndexFreeSampler",
    "IterableDatasetShard",
    "ResumeWarning",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "TokenBatchSampler",
    "UndividedStreamWarning",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    __name__,
    {
        "adapter": "DataLoaderAdapter DataLoaderStateMixin",
        "iterable": "AlreadyShardedWarning UndividedStreamWarning",
        "sampling": "BatchCoverage IndexFreeSampler SeedableRandomSampler SkipBatchSampler",
        "dispatch": "DataLoaderDispatcher",
        "loader": "PreparedLoader DataLoaderShard get_sampler",
        "prepare": "prepare_data_loader SkipDataLoader skip_first_batches",
        "sharding": "BatchSamplerShard IterableDatasetShard",
        "token_batches": "TokenBatchSampler",
    },
)
