"""Reseed random streams while reading, so that draws depend only on seed, epoch and position of the sample.

So augmentation doesn't depend on the number of ranks and workers, or on where a run was resumed. The streams are
reseeded before each sample: the seed is sent with the indices and takes effect when they are iterated over, so neither
the dataset nor ``worker_init_fn`` changes. Unlike the index, the position differs for a sample that comes twice in an
epoch (sampling with replacement).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch
from torch.utils.data import Dataset, get_worker_info

from ..distributed.random import capture_host_streams, same_stream_state, seed_host_streams, set_host_stream

if TYPE_CHECKING:
    from .resume import Progress
    from .sampling import BatchInfo

T = TypeVar("T")

_END: Final = object()


@final
@dataclass
class SampleSeed:
    """The seed of all draws while reading samples: the same on all ranks, saved with the order of the samples."""

    value: int

    def keyed(self, batches: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Yield the first batches (or samples) of ``epoch``; reseed the streams before each sample."""
        position = 0
        for batch in batches:
            try:
                size = len(batch)
            except TypeError:
                yield seeded(batch, derived_seed(self.value, epoch, position))
                size = 1
            else:
                yield KeyedSamples(batch, self.value, epoch, position)
            position += size


@final
@dataclass(frozen=True)
class KeyedSamples:
    """The indices of one batch; iterating reseeds the streams before each index, or before the first one."""

    indices: Any
    seed: int
    epoch: int
    first: int  # the position of the first one in the epoch
    stride: int = 1  # between the positions of the samples; 0 if the batch has one

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[object]:
        for number, index in enumerate(self.indices):
            position = self.first + number * self.stride if self.stride or not number else None
            yield index if position is None else seeded(index, derived_seed(self.seed, self.epoch, position))


@final
@dataclass(frozen=True)
class KeyedSample:
    """One index of a loader that doesn't batch; unpickling it returns the plain index and seeds the streams."""

    index: Any
    seed: int

    def __reduce__(self) -> tuple[object, ...]:
        return seeded, (self.index, self.seed)


def seeded(index: T, seed: int) -> T:
    """Seed the streams for the next sample, and return its ``index``."""
    seed_host_streams(seed)
    return index


@final
class SampleKeys:
    """A function object that returns a batch's indices with the seeds of the samples; call it in order.

    Args:
        index, count: this rank's shard of a sampler that shards itself: every ``count``-th sample.
        first_sample: returns the number in the epoch of a batch's first sample, and the stride to the next ones; None
            if the sampler shards itself.
        in_process: this process reads the samples, and saves and restores its own streams around that.
    """

    def __init__(
        self,
        seed: SampleSeed,
        progress: Progress,
        index: int,
        count: int,
        *,
        first_sample: Callable[[int, BatchInfo], tuple[int, int]] | None,
        is_batched: bool,
        in_process: bool,
    ) -> None:
        self._seed, self._progress, self._epoch = seed, progress, progress.epoch
        self._index, self._count = index, count
        self._first_sample, self._is_batched, self._in_process = first_sample, is_batched, in_process
        self._samples = -1  # drawn by all ranks so far
        self._saved_streams: dict[str, Any] = {}

    def __call__(self, batch_info: BatchInfo) -> object:
        samples = self._progress.position.samples if self._samples < 0 else self._samples
        self._samples = batch_info.samples
        first, stride = samples + self._index, self._count
        if self._first_sample is not None:
            first, stride = self._first_sample(samples, batch_info)
        if self._in_process:  # after the sampler's draws, before the dataset's
            self._saved_streams = capture_host_streams()
        if self._is_batched:
            return KeyedSamples(batch_info.indices, self._seed.value, self._epoch, first, stride)
        seed = derived_seed(self._seed.value, self._epoch, first)
        return seeded(batch_info.indices, seed) if self._in_process else KeyedSample(batch_info.indices, seed)

    def undisturbed(self, batches: Iterator[object]) -> Iterator[object]:
        """Yield ``batches``, without advancing this process's random streams."""
        batch = None
        while batch is not _END:
            try:
                batch = next(batches, _END)
            finally:
                for name, state in self._saved_streams.items():
                    set_host_stream(name, state)
                self._saved_streams = {}
            if batch is not _END:
                yield batch


@final
class OneByOne(Dataset[Any]):
    """A wrapper that reads one sample at a time from a dataset with ``__getitems__``."""

    def __init__(self, dataset: object) -> None:
        self.dataset: Any = dataset

    def __getitem__(self, index: object) -> object:
        return self.dataset.__getitems__([index])[0]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> object:
        if name in ("dataset", "__getitems__"):  # missing while it is unpickled; never present
            raise AttributeError(name)
        return getattr(self.dataset, name)


# --------------------------------------------------------------------------------------------------
# Random streams of workers: reseeded for each batch
#
# Torch seeds a worker once, when it starts, so a run that resumes inside an epoch would augment differently with its
# new workers. Here the worker's streams are reseeded with every batch, from the worker's own seed, the epoch and the
# number of the batch. The seed is sent with the indices and takes effect when they are unpickled, so neither the
# dataset nor ``worker_init_fn`` changes.

# The process id and the first seed of this worker; the streams' current seed changes with every batch.
_first_seed: tuple[int, int] | None = None


@final
@dataclass(frozen=True)
class KeyedIndices:
    """The indices of one batch; unpickling them in a worker returns the plain indices and seeds its streams."""

    indices: Any
    epoch: int
    number: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[object]:
        return iter(self.indices)

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self.indices, self.epoch, self.number)


def _received(indices: T, epoch: int, number: int) -> T:
    worker = get_worker_info()
    if worker is not None:
        seed_host_streams(derived_seed(_seed_of_all_workers(worker.id), epoch, number))
    return indices


def _seed_of_all_workers(worker_id: int) -> int:
    """Return the base seed of the workers, to which torch and most ``worker_init_fn`` add the worker's id."""
    global _first_seed
    if _first_seed is None or _first_seed[0] != os.getpid():
        _first_seed = (os.getpid(), torch.initial_seed())
    return _first_seed[1] - worker_id


def derived_seed(seed: int, epoch: int, number: int) -> int:
    """Return a 63-bit hash of ``seed``, ``epoch`` and ``number``."""
    key = f"{seed}/{epoch}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


# --------------------------------------------------------------------------------------------------
# Random streams of the other ranks if rank 0 reads for them: they follow rank 0's draws

#: By name of the stream: its state before and after rank 0's draws.
Moves = Mapping[str, tuple[Any, Any]]


@final
class SharedDraws:
    """The host streams and the loader's generators, which the other ranks advance as rank 0's reads do.

    Args:
        generators: those that the loader and its samplers draw from, in the same order on every rank.
    """

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self._generators = {f"generator {number}": one for number, one in enumerate(generators) if one is not None}

    def capture(self) -> dict[str, object]:
        """Return the current state of each stream."""
        return {**capture_host_streams(), **{name: one.get_state() for name, one in self._generators.items()}}

    def moves_since(self, before: Mapping[str, object]) -> Moves:
        """Return the streams that have changed since ``before`` was captured."""
        after = self.capture()
        return {
            name: (state, after[name]) for name, state in before.items() if not same_stream_state(state, after[name])
        }

    def follow(self, moves: Moves) -> None:
        """Set streams that equal rank 0's before the read to rank 0's after it; leave the others unchanged."""
        own = self.capture() if moves else {}
        for name, (before, after) in moves.items():
            if not same_stream_state(own.get(name), before):
                continue
            if name in self._generators:
                self._generators[name].set_state(after)
            else:
                set_host_stream(name, after)
