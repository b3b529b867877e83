"""Assign the batches of one order to data-parallel ranks, and pad the last global batch.

In each *step* every data-parallel rank gets one batch; together these are the *global batch*. Each rank gets one batch
of the user's batch sampler or, with ``split_batches``, an equal part of one such batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..distributed.random import capture_host_streams, host_streams
from ..errors import PreparationError
from ..nested import recursively_apply
from .sampling import (
    BEGINNING,
    FINGERPRINT_LENGTH,
    NUM_AHEAD,
    BatchCoverage,
    BatchInfo,
    KnownOrder,
    OverBatchSampler,
    PositionedBatchSampler,
    RemainingBatches,
    ResumePosition,
    batches_from,
    full_coverage,
    has_state,
    num_samples_of,
)

_END: Final = object()

#: Maps the number of samples each rank has drawn before, and the size of the batch, to the batch's coverage.
CoverageFunction = Callable[[int, int], BatchCoverage | None]


def check_split(batch_size: int | None, num_parts: int) -> None:
    """Raise unless batches can be split into equal parts.

    Raises:
        PreparationError: their size is unknown, or no multiple of the number of parts.
    """
    if batch_size is None:
        raise PreparationError(
            "split_batches=True cuts each batch into equal parts, but neither the loader nor its batch sampler has a "
            "batch_size. Give the batch sampler one, or use split_batches=False."
        )
    if batch_size % num_parts:
        raise PreparationError(
            f"split_batches=True cuts each batch into {num_parts} equal parts (one per process), but the batch size is "
            f"{batch_size}. Use a multiple of {num_parts}, or split_batches=False, where each process gets whole "
            "batches."
        )


def mark_last(batch_infos: Iterator[BatchInfo]) -> Iterator[BatchInfo]:
    """Yield ``batch_infos`` with the last one marked, by reading one ahead."""
    held: BatchInfo | None = None
    for batch_info in batch_infos:
        if held is not None:
            yield held
        held = batch_info
    if held is not None:
        yield held._replace(is_last=True)


def draw_unsharded(
    remaining: RemainingBatches, count: int = 1, coverage_of: CoverageFunction | None = None
) -> Iterator[BatchInfo]:
    """Yield the info of every batch, the last one marked, for a loader that isn't sharded here.

    ``count`` ranks read one such batch each. ``coverage_of`` returns the coverage, given the samples that each rank has
    drawn before and the size of the batch.
    """
    steps, batches, samples = remaining.position.steps, remaining.position.batches, remaining.position.samples
    upcoming = iter(remaining.batches)
    batch = next(upcoming, _END)
    size, coverage = -1, None
    while batch is not _END:
        following = next(upcoming, _END)
        if coverage_of is not None:
            size = num_samples_of(batch)
            coverage = coverage_of(samples // count, size)
        # Batches nearly always are lists of the same size.
        elif size != (size := len(batch) if type(batch) is list else num_samples_of(batch)):
            coverage = full_coverage(size, count)
        steps += 1
        batches += 1
        samples += size * count
        yield BatchInfo(batch, coverage, following is _END, steps, batches, samples, batch)
        batch = following


class BatchSamplerShard(OverBatchSampler):
    """One process's batches of ``batch_sampler``, which is sharded over ``num_processes`` processes.

    Without ``split_batches`` process r takes the batches r, r + N, r + 2N, ...; with it, the r-th part of every
    batch. With ``even_batches`` an incomplete last global batch is padded with samples from the beginning of the
    epoch, so all processes have the same number of batches of equal size; without it, some have fewer or smaller ones.
    If the batch sampler drops its last batch, an incomplete global batch is dropped.

    Raises:
        PreparationError: ``split_batches`` with batches that can't be split into ``num_processes`` equal parts.
    """

    def __init__(
        self,
        batch_sampler: Iterable[object],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        if split_batches:
            check_split(self.batch_size, num_processes)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        #: How many rows of a global batch each process gets, if they differ. A pass keeps those it began with.
        self.sizes: tuple[int, ...] = ()

    @property
    def batches_per_step(self) -> int:
        """The number of the batch sampler's batches that all processes use in one step."""
        return 1 if self.split_batches else self.num_processes

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all processes use in one step; the average, if planned batches differ."""
        inner = self.batch_sampler
        size = inner.mean_batch_size if isinstance(inner, PositionedBatchSampler) else self.batch_size
        return (size or 1) * self.batches_per_step

    @property
    def rows_of_processes(self) -> tuple[int, ...]:
        """How many rows of a global batch each process gets."""
        return self.sizes or (self.batch_size * self.batches_per_step // self.num_processes,) * self.num_processes

    @property
    def num_first_batches(self) -> int:
        """The number of the epoch's first batches that may pad the last global batch."""
        return self.batches_per_step

    def first_sample(self, samples: int, batch_info: BatchInfo) -> tuple[int, int]:
        """Return the number in the epoch of the first sample of this process's batch, and the stride to the next ones.

        Args:
            samples: how many samples come before the step.
        """
        return samples + sum(batch_info.coverage.size[: self.process_index] if batch_info.coverage else ()), 1

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.split_batches:
            return length - (0 if self.even_batches or self.drop_last or self._has_part_of_last(length) else 1)
        if length % self.num_processes == 0:
            return length // self.num_processes
        steps = length // self.num_processes
        if self.drop_last:
            return steps
        return steps + (1 if self.even_batches or self.process_index < length % self.num_processes else 0)

    def _has_part_of_last(self, length: int) -> bool:
        """Return whether the last of ``length`` batches has a part for this process, as far as known."""
        try:
            num_samples = len(cast("Any", self.sampler))
        except TypeError:  # there is no sampler of single samples, or it has no length
            return True
        rest = num_samples % self.batch_size
        is_plain = length == -(-num_samples // self.batch_size)
        return not is_plain or not rest or self.process_index * (self.batch_size // self.num_processes) < rest

    def __iter__(self) -> Iterator[Any]:
        for batch_info in self.draw(BEGINNING):
            yield batch_info.indices

    def draw(self, position: ResumePosition) -> Iterator[BatchInfo]:
        """Yield the infos of this process's batches from ``position`` on, the last one marked."""
        return mark_last(self._assign(batches_from(self.batch_sampler, position, self.batches_per_step)))

    def assign(self, remaining: RemainingBatches) -> Iterator[BatchInfo]:
        """Yield the infos of this process's batches from the remaining batches of a batch sampler."""
        return mark_last(self._assign(remaining))

    # -- one step --------------------------------------------------------------------------------------

    def _assign(self, remaining: RemainingBatches) -> Iterator[BatchInfo]:
        if remaining.order is not None:  # torch's own batch sampler, whose settings the program may have changed
            inner = self.batch_sampler
            if self.batch_size == inner.batch_size and self.drop_last == bool(inner.drop_last):
                return self._assign_positions(remaining.order, remaining.position)
        return self._assign_batches(remaining)

    def _assign_batches(self, remaining: RemainingBatches) -> Iterator[BatchInfo]:
        is_cut = self.split_batches or bool(self.sizes)
        take = partial(self._part_of, self.rows_of_processes) if is_cut else self._whole_batch
        steps, batches, samples = remaining.position.steps, remaining.position.batches, remaining.position.samples
        size = self.batches_per_step
        step_batches = list(islice(remaining.batches, size))
        while step_batches:
            following = list(islice(remaining.batches, size))
            steps += 1
            batches += len(step_batches)
            # To pad the last batch, or any short batch that is split, with the epoch's first batches.
            first_batches = [] if following and not self.split_batches else remaining.first_batches
            taken = take(step_batches, first_batches, not following)
            if taken is not None:
                indices, coverage = taken
                samples += coverage.num_samples
                yield BatchInfo(indices, coverage, False, steps, batches, samples, step_batches[-1])
            step_batches = following

    def _assign_positions(self, order: KnownOrder, position: ResumePosition) -> Iterator[BatchInfo]:
        """Yield the same infos from an order with random access.

        It looks up only this process's indices, so a step costs the same for any number of processes.
        """
        steps, batches, samples = position.steps, position.batches, position.samples
        per_step = self.batch_size * self.batches_per_step
        sizes = self.rows_of_processes
        start, per_rank = sum(sizes[: self.process_index]), sizes[self.process_index]
        coverage = BatchCoverage(sizes, sizes)
        places = torch.arange(start, start + per_rank, device="cpu")
        # The fingerprint of the global batch needs its last indices.
        num_last = min(self.batch_size, FINGERPRINT_LENGTH)
        offsets = torch.cat([places, torch.arange(per_step - num_last, per_step, device="cpu")])
        num_steps = max(order.length - samples, 0) // per_step
        num_ahead = max(NUM_AHEAD // len(offsets), 1)
        for step in range(0, num_steps, num_ahead):
            starts = position.samples + per_step * torch.arange(step, min(step + num_ahead, num_steps), device="cpu")
            for indices in order.at(starts[:, None] + offsets).tolist():
                steps += 1
                batches += self.batches_per_step
                samples += per_step
                if samples == order.length:
                    order.finish()
                yield BatchInfo(indices[:per_rank], coverage, False, steps, batches, samples, indices[per_rank:])
        rest = max(order.length - samples, 0)
        if rest or not num_steps:
            order.finish()
        if not rest or self.drop_last:
            return
        valid = _valid_rows(rest, sizes)
        if self.even_batches:
            taken = torch.where(places < rest, samples + places, (places - rest) % min(per_step, order.length))
            coverage = BatchCoverage(valid, sizes)
        else:
            taken = samples + places[places < rest]
            coverage = BatchCoverage(valid, valid, valid.count(0))
        if len(taken):
            num_batches = -(-rest // self.batch_size)
            last_start = samples + (num_batches - 1) * self.batch_size
            last = order.part(max(last_start, order.length - FINGERPRINT_LENGTH), order.length)
            yield BatchInfo(
                order.at(taken).tolist(), coverage, False, steps + 1, batches + num_batches, order.length, last
            )

    def _whole_batch(
        self, step_batches: list[Sequence[object]], first_batches: list[Sequence[object]], is_final: bool
    ) -> tuple[Sequence[object], BatchCoverage] | None:
        count, index, size = self.num_processes, self.process_index, self.batch_size
        sizes = [num_samples_of(batch) for batch in step_batches]
        if not is_final or (len(step_batches) == count and (size is None or sizes[-1] == size)):
            return step_batches[index], _full_step_coverage(sizes)
        if self.drop_last:
            return None
        if not self.even_batches:
            if index >= len(step_batches):
                return None
            absent = count - len(step_batches)
            valid = tuple(sizes + [0] * absent)
            return step_batches[index], BatchCoverage(valid, valid, absent) if absent else _full_step_coverage(sizes)
        padded = padded_step(step_batches, first_batches, count, size)
        valid = tuple(sizes + [0] * (count - len(sizes)))
        return padded[index], BatchCoverage(valid, tuple(num_samples_of(batch) for batch in padded))

    def _part_of(
        self, sizes: tuple[int, ...], batches: list[Sequence[object]], first: list[Sequence[object]], is_final: bool
    ) -> tuple[Sequence[object], BatchCoverage] | None:
        batch = batches[0] if len(batches) == 1 else [*chain.from_iterable(batches)]
        start = sum(sizes[: self.process_index])
        end, num_rows, num_valid = start + sizes[self.process_index], sum(sizes), num_samples_of(batch)
        if num_valid == num_rows:
            return batch[start:end], BatchCoverage(sizes, sizes)
        if is_final and self.drop_last:
            return None
        valid = _valid_rows(num_valid, sizes)
        if self.even_batches:
            return padded_step([batch], first, 1, num_rows)[0][start:end], BatchCoverage(valid, sizes)
        part = batch[start:end]
        return (part, BatchCoverage(valid, valid, valid.count(0))) if num_samples_of(part) else None


def _valid_rows(num_valid: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of ``num_valid`` rows, which come first, are in each part of these sizes."""
    return tuple(min(max(num_valid - end + size, 0), size) for size, end in zip(sizes, accumulate(sizes), strict=True))


def _full_step_coverage(sizes: list[int]) -> BatchCoverage:
    if sizes.count(sizes[0]) == len(sizes):
        return full_coverage(sizes[0], len(sizes))
    return BatchCoverage(tuple(sizes), tuple(sizes))


def padded_step(
    step_batches: list[Sequence[object]], first_batches: list[Sequence[object]], count: int, size: int | None
) -> list[Sequence[object]]:
    """Pad the given batches to ``count`` batches of ``size`` samples, with samples from the epoch's beginning.

    Without a common size, add copies of the epoch's first batches.
    """
    if size is None:
        return step_batches + [
            first_batches[missing % len(first_batches)] for missing in range(count - len(step_batches))
        ]
    beginning = list(chain.from_iterable(first_batches))
    padded: list[Any] = []
    num_added = 0
    for rank in range(count):
        batch = list(step_batches[rank]) if rank < len(step_batches) else []
        while len(batch) < size:
            batch.append(beginning[num_added % len(beginning)])
            num_added += 1
        padded.append(batch)
    return padded


# -- iterable datasets -------------------------------------------------------------------------------------


@final
@dataclass
class LastItem:
    """The last item of a padded global batch, with the coverage of that batch."""

    item: Any
    coverage: BatchCoverage


@final
@dataclass
class LastBatch:
    """A collated batch of a padded global batch, with the coverage of the global batch."""

    batch: Any
    coverage: BatchCoverage

    def pin_memory(self) -> LastBatch:
        """Return the same batch in pinned memory."""
        pinned = recursively_apply(lambda tensor: cast("torch.Tensor", tensor).pin_memory(), self.batch)
        return LastBatch(pinned, self.coverage)


@final
@dataclass
class CollateWithCoverage:
    """A collate function that passes on a padded global batch's coverage, its last item."""

    collate: Callable[[Any], Any]

    def __call__(self, items: Any) -> object:
        if type(items) is LastItem:  # a loader that doesn't batch
            return LastBatch(self.collate(items.item), items.coverage)
        last = items[-1] if type(items) is list and items else None
        if type(last) is LastItem:
            items[-1] = last.item
            return LastBatch(self.collate(items), last.coverage)
        return self.collate(items)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of an iterable dataset, which is sharded over ``num_processes`` processes.

    Every process reads the whole dataset, in global batches of ``batch_size`` samples per process (of ``batch_size`` in
    total with ``split_batches``), and keeps its shard. An incomplete last global batch is padded with samples of the
    first one, or dropped with ``drop_last``.

    Raises:
        PreparationError: ``split_batches`` with a batch size that can't be split into ``num_processes`` equal parts.
    """

    def __init__(
        self,
        dataset: Iterable[object],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch: int = 0
        self.num_skipped = 0  # samples that a pass discards before its first batch
        self.first_global_batch: Callable[[], list[Any]] | None = None  # reads it again, for a pass that begins later
        self.has_ended = False  # the pass has reached the end of the dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also on the dataset."""
        self.epoch = epoch
        forward = getattr(self.dataset, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all processes use in one step."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        # Documented: the samples of one process, in global batches of batch_size per process in both modes.
        global_batch_size = self.batch_size * self.num_processes
        steps, rest = divmod(len(self.dataset), global_batch_size)
        return (steps + (1 if rest and not self.drop_last else 0)) * self.batch_size

    @property
    def num_steps(self) -> int:
        """The number of batches per process, if the dataset has a length."""
        steps, rest = divmod(len(self.dataset), self.global_batch_size)
        return steps + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[object]:
        self.seed_generator()
        for item in self.draw([]):
            yield item.item if type(item) is LastItem else item

    def seed_generator(self) -> None:
        """Seed the dataset's generator from the epoch, unless the dataset has ``set_epoch``."""
        if getattr(self.dataset, "set_epoch", None) is None:
            generator = getattr(self.dataset, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self.epoch)

    def draw(self, first: list[Any]) -> Iterator[object]:
        """Yield this process's samples; the last one of a padded global batch is a :class:`LastItem`.

        The first global batch is put into ``first``.
        """
        total = self.global_batch_size
        size = total // self.num_processes
        start = self.process_index * size
        self.has_ended: bool = False
        read_first, self.first_global_batch = self.first_global_batch, None  # for this pass
        stream = iter(self.dataset)
        if self.num_skipped:
            stream = islice(stream, self.num_skipped, None)
        while samples := list(islice(stream, total)):
            if not first:
                first += samples
            if len(samples) == total:
                yield from samples[start : start + size]
                continue
            self.has_ended = True
            if not self.drop_last:
                num_valid = len(samples)
                if read_first is not None:
                    first = read_first()
                padded = samples + [first[added % len(first)] for added in range(total - num_valid)]
                sizes = (size,) * self.num_processes
                coverage = BatchCoverage(_valid_rows(num_valid, sizes), sizes)
                yield from padded[start : start + size - 1]
                yield LastItem(padded[start + size - 1], coverage)


@final
class ShardedStream(IterableDataset[Any]):
    """The dataset read by the loader of a sharded iterable dataset: this rank's samples, with coverage if padded."""

    def __init__(self, shard: IterableDatasetShard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[object]:
        return self.shard.draw([])


@final
class StatefulShardedStream(IterableDataset[Any]):
    """A ShardedStream over a stateful dataset; torchdata's loader reads its state here, also in workers."""

    def __init__(self, shard: IterableDatasetShard) -> None:
        self.shard = shard
        self._start: Any = None  # the dataset's state at the beginning of the pass
        self._first: list[Any] | None = None  # the pass's first samples, where that state is unknown
        self._loaded: Mapping[str, Any] | None = None  # until the pass that resumes from it begins
        self._unread: Mapping[str, Any] | None = None  # the same until that pass yields a sample

    def __iter__(self) -> Iterator[object]:
        loaded, self._loaded = self._loaded, None
        first: list[Any] = []
        if loaded is not None:
            self._start, self._first = loaded["start"], loaded.get("first")
        elif self._start is None:
            self._start = self.shard.dataset.state_dict()
        else:  # a later pass of a persistent worker: the dataset can still answer with the end of the pass before
            self._first = first
        return iter(()) if loaded is not None and self.shard.has_ended else self._draw(first)

    def _draw(self, first: list[Any]) -> Iterator[object]:
        for sample in self.shard.draw(first):
            self._unread = None
            yield sample
        self._unread = None

    def state_dict(self) -> dict[str, object]:
        """Return the dataset's current state, and for padding the one at the epoch's start, or the first samples."""
        if self._unread is not None:  # a dataset may apply a loaded state when it is read, and until then tell another
            return dict(self._unread)
        stream = self.shard.dataset.state_dict()
        # A copy: torchdata finds what has changed by comparing with the state before.
        first = None if self._first is None else [*self._first]
        return {"start": self._start, "first": first, "stream": stream, "has_ended": self.shard.has_ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next pass."""
        shard, stream, first = self.shard, self.shard.dataset, state.get("first")
        if first is None and not shard.drop_last and not state["has_ended"]:
            with host_streams(capture_host_streams()):
                stream.load_state_dict(state["start"])
                first = list(islice(iter(stream), shard.global_batch_size))
        shard.first_global_batch = (lambda: first) if first else None
        stream.load_state_dict(state["stream"])
        shard.has_ended, self._loaded, self._unread = state["has_ended"], state, state


@final
class StreamFrom(IterableDataset[Any]):
    """A view of ``dataset`` without its first ``num_samples`` samples, which it reads and discards."""

    def __init__(self, dataset: Iterable[object], num_samples: int) -> None:
        self.dataset = dataset
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[object]:
        return islice(iter(self.dataset), self.num_samples, None)


# --------------------------------------------------------------------------------------------------
# Random generators inside a dataset, which a checkpoint can't save

_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEEPEST: Final = 4  # a transform in a list of transforms in a dataset in a subset
_MOST_ITEMS: Final = 64  # larger containers hold data


def hidden_generators(dataset: object, known: object = None) -> list[str]:
    """Return the paths of generators in ``dataset``, other than ``known``: ``dataset.transform.rng``."""
    return list(_search(dataset, "dataset", _DEEPEST, {id(known)}))


def _search(value: object, path: str, depth: int, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _GENERATORS):
        if id(value) not in seen:
            yield path
        return
    if depth == 0 or id(value) in seen or has_state(value):
        return
    seen.add(id(value))
    for name, item in _members(value):
        yield from _search(item, f"{path}{name}", depth - 1, seen)


def _members(value: object) -> list[tuple[str, object]]:
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", item) for number, item in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, (str, bytes, torch.Tensor, np.ndarray, type)):
        return []
    return [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
