"""Prepared loaders: every process gets its part of the data, knows which of it is real, and where it stands."""

from __future__ import annotations

from .adapter import DataLoaderAdapter, DataLoaderStateMixin
from .aware import AlreadyShardedWarning
from .coverage import BatchCoverage, keep_real
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
    "get_sampler",
    "keep_real",
    "prepare_data_loader",
    "skip_first_batches",
]
