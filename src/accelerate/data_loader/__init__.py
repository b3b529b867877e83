"""Prepared loaders: every process gets its part of the data, knows which of it is real, and where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_from

if TYPE_CHECKING:
    from .adapter import DataLoaderAdapter, DataLoaderStateMixin
    from .aware import AlreadyShardedWarning, UndividedStreamWarning
    from .coverage import BatchCoverage
    from .dispatch import DataLoaderDispatcher
    from .index_free import IndexFreeSampler
    from .order import SeedableRandomSampler, SkipBatchSampler
    from .prefetch import BatchFeeder, DataLoaderShard, get_sampler
    from .prepare import prepare_data_loader
    from .shard import BatchSamplerShard, IterableDatasetShard
    from .skip import SkipDataLoader, skip_first_batches
    from .stream import ResumeWarning

__all__ = [
    "AlreadyShardedWarning",
    "BatchCoverage",
    "BatchFeeder",
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
    "UndividedStreamWarning",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

__getattr__ = names_from(
    __name__,
    __name__,
    {
        "adapter": "DataLoaderAdapter DataLoaderStateMixin",
        "aware": "AlreadyShardedWarning UndividedStreamWarning",
        "coverage": "BatchCoverage",
        "dispatch": "DataLoaderDispatcher",
        "index_free": "IndexFreeSampler",
        "order": "SeedableRandomSampler SkipBatchSampler",
        "prefetch": "BatchFeeder DataLoaderShard get_sampler",
        "prepare": "prepare_data_loader",
        "shard": "BatchSamplerShard IterableDatasetShard",
        "skip": "SkipDataLoader skip_first_batches",
        "stream": "ResumeWarning",
    },
)
