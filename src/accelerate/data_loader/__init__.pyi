"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from .adapter import DataLoaderAdapter as DataLoaderAdapter, DataLoaderStateMixin as DataLoaderStateMixin
from .dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from ..errors import ResumeWarning as ResumeWarning
from .iterable import AlreadyShardedWarning as AlreadyShardedWarning, UndividedStreamWarning as UndividedStreamWarning
from .loader import DataLoaderShard as DataLoaderShard, get_sampler as get_sampler, PreparedLoader as PreparedLoader
from .prepare import prepare_data_loader as prepare_data_loader, skip_first_batches as skip_first_batches
from .prepare import SkipDataLoader as SkipDataLoader
from .sampling import BatchCoverage as BatchCoverage, IndexFreeSampler as IndexFreeSampler
from .sampling import SeedableRandomSampler as SeedableRandomSampler, SkipBatchSampler as SkipBatchSampler
from .sharding import BatchSamplerShard as BatchSamplerShard, IterableDatasetShard as IterableDatasetShard
from .token_batches import TokenBatchSampler as TokenBatchSampler
