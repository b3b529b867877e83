"""How the batches of one order are dealt to the shares of a world, and what completes the last round.

A *group* is a batch of the user's batch sampler. A *round* is what all shares get at the same time: one group
each, or, with ``split_batches``, one group cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, cast, final

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accelerate.errors import PreparationError
from accelerate.nested import recursively_apply

from .coverage import BatchCoverage, full_coverage
from .order import BEGINNING, Drawn, Entered, Place, enter, num_samples_of

_END: Final = object()

#: From the samples drawn before by each rank, and the size of the batch, to the account of the batch.
Account = Callable[[int, int], BatchCoverage | None]


def mark_last(dealt: Iterator[Drawn]) -> Iterator[Drawn]:
    """``dealt``, with the last one marked: it is known to be the last before it is given out."""
    held: Drawn | None = None
    for drawn in dealt:
        if held is not None:
            yield held
        held = drawn
    if held is not None:
        yield held._replace(is_last=True)


def draw_whole(entered: Entered, count: int = 1, account: Account | None = None) -> Iterator[Drawn]:
    """Every group as it is, the last one marked, for a loader that isn't sharded here.

    ``count`` ranks read one such group each. ``account`` tells which rows are real, from the samples that each rank
    drew before and the size of the group.
    """
    rounds, groups, samples = entered.place.rounds, entered.place.groups, entered.place.samples
    upcoming = iter(entered.groups)
    group = next(upcoming, _END)
    size, coverage = -1, None
    while group is not _END:
        following = next(upcoming, _END)
        if account is not None:
            size = num_samples_of(group)
            coverage = account(samples // count, size)
        elif size != (size := num_samples_of(group)):  # groups are nearly always of one size
            coverage = full_coverage(size, count)
        rounds += 1
        groups += 1
        samples += size * count
        yield Drawn(group, coverage, following is _END, rounds, groups, samples, group)
        group = following


class BatchSamplerShard(BatchSampler):
    """The batches of ``batch_sampler`` that belong to one of ``num_processes`` processes.

    Without ``split_batches`` process r takes the batches r, r + N, r + 2N, ...; with it, the r-th part of every
    batch. With ``even_batches`` a last round that is incomplete is completed with samples from the beginning of
    the epoch, so that all processes have equally many batches of equal size; without it, some processes have
    fewer or smaller ones. A batch sampler that drops its last batch drops incomplete rounds.

    Raises:
        PreparationError: ``split_batches`` with batches that can't be cut into ``num_processes`` equal parts.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        size = getattr(batch_sampler, "batch_size", None)
        if split_batches and (size is None or size % num_processes != 0):
            known = "has no batch_size" if size is None else f"has batches of {size}"
            raise PreparationError(
                f"split_batches=True cuts each batch into {num_processes} equal parts (one per process), but the "
                f"batch sampler {known}. Use batches of a multiple of {num_processes}, or split_batches=False."
            )
        self.batch_sampler: Any = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = size
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """The number of batches of the batch sampler itself."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> Any:
        """The sampler inside the batch sampler, where it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        self.batch_sampler.sampler = value

    @property
    def groups_per_round(self) -> int:
        """How many batches of the batch sampler all processes take at once."""
        return 1 if self.split_batches else self.num_processes

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.split_batches:
            return length - (0 if self.even_batches or self.drop_last or self._has_part_of_last(length) else 1)
        if length % self.num_processes == 0:
            return length // self.num_processes
        rounds = length // self.num_processes
        if self.drop_last:
            return rounds
        return rounds + (1 if self.even_batches or self.process_index < length % self.num_processes else 0)

    def _has_part_of_last(self, length: int) -> bool:
        """Whether the last one of ``length`` batches is large enough to be cut for this process, as far as is known."""
        try:
            num_samples = len(cast("Any", self.sampler))
        except TypeError:  # no sampler of single samples, or one without a length
            return True
        rest = num_samples % self.batch_size
        is_plain = length == -(-num_samples // self.batch_size)
        return not is_plain or not rest or self.process_index * (self.batch_size // self.num_processes) < rest

    def __iter__(self) -> Iterator[Any]:
        for drawn in self.draw(BEGINNING):
            yield drawn.indices

    def draw(self, place: Place) -> Iterator[Drawn]:
        """The batches of this process from ``place`` on, each with its account, the last one marked."""
        return mark_last(self._deal(enter(self.batch_sampler, place, self.groups_per_round)))

    def deal(self, entered: Entered) -> Iterator[Drawn]:
        """Like :meth:`draw`, for a batch sampler that has been entered already."""
        return mark_last(self._deal(entered))

    # -- one round -------------------------------------------------------------------------------------

    def _deal(self, entered: Entered) -> Iterator[Drawn]:
        take = self._part_of if self.split_batches else self._group_of
        rounds, groups, samples = entered.place.rounds, entered.place.groups, entered.place.samples
        size = self.groups_per_round
        dealt = list(islice(entered.groups, size))
        while dealt:
            following = list(islice(entered.groups, size))
            rounds += 1
            groups += len(dealt)
            taken = take(dealt, entered.head, not following)
            if taken is not None:
                indices, coverage = taken
                samples += coverage.num_samples
                yield Drawn(indices, coverage, False, rounds, groups, samples, dealt[-1])
            dealt = following

    def _group_of(self, dealt: list[Any], head: list[Any], is_final: bool) -> tuple[Any, BatchCoverage] | None:
        count, index, size = self.num_processes, self.process_index, self.batch_size
        sizes = [num_samples_of(group) for group in dealt]
        if not is_final or (len(dealt) == count and (size is None or sizes[-1] == size)):
            return dealt[index], _whole_round(sizes)
        if self.drop_last:
            return None
        if not self.even_batches:
            if index >= len(dealt):
                return None
            absent = count - len(dealt)
            real = tuple(sizes + [0] * absent)
            return dealt[index], BatchCoverage(real, real, absent) if absent else _whole_round(sizes)
        completed = _completed(dealt, head, count, size)
        real = tuple(sizes + [0] * (count - len(sizes)))
        return completed[index], BatchCoverage(real, tuple(num_samples_of(group) for group in completed))

    def _part_of(self, dealt: list[Any], head: list[Any], is_final: bool) -> tuple[Any, BatchCoverage] | None:
        count, index, group = self.num_processes, self.process_index, dealt[0]
        size = self.batch_size // count
        num_real = num_samples_of(group)
        if num_real == self.batch_size:
            return group[index * size : (index + 1) * size], full_coverage(size, count)
        if is_final and self.drop_last:
            return None
        real = tuple(min(max(num_real - share * size, 0), size) for share in range(count))
        if self.even_batches:
            group = _completed([group], head[:1], 1, self.batch_size)[0]
            return group[index * size : (index + 1) * size], BatchCoverage(real, (size,) * count)
        part = group[index * size : (index + 1) * size]
        return (part, BatchCoverage(real, real, real.count(0))) if num_samples_of(part) else None


def _whole_round(sizes: list[int]) -> BatchCoverage:
    if sizes.count(sizes[0]) == len(sizes):
        return full_coverage(sizes[0], len(sizes))
    return BatchCoverage(tuple(sizes), tuple(sizes))


def _completed(dealt: list[Any], head: list[Any], count: int, size: int | None) -> list[Any]:
    """``count`` groups: those dealt, filled up to ``size`` and followed by further ones, from the epoch's beginning.

    Groups of no common size are followed by copies of the first ones.
    """
    if size is None:
        return dealt + [head[missing % len(head)] for missing in range(count - len(dealt))]
    beginning = list(chain.from_iterable(head))
    completed: list[Any] = []
    position = 0
    for share in range(count):
        group = list(dealt[share]) if share < len(dealt) else []
        while len(group) < size:
            group.append(beginning[position % len(beginning)])
            position += 1
        completed.append(group)
    return completed


# -- streams -----------------------------------------------------------------------------------------------


@final
@dataclass
class LastItem:
    """The last item of a round that was completed, and the account of that round."""

    item: Any
    coverage: BatchCoverage


@final
@dataclass
class LastBatch:
    """A collated batch of a round that was completed, and the account of that round."""

    batch: Any
    coverage: BatchCoverage

    def pin_memory(self) -> LastBatch:
        """The same batch in page-locked memory."""
        pinned = recursively_apply(lambda tensor: cast("torch.Tensor", tensor).pin_memory(), self.batch)
        return LastBatch(pinned, self.coverage)


@final
@dataclass
class CollateAccount:
    """``collate`` for items among which the last of a completed round carries the account of that round."""

    collate: Callable[[Any], Any]

    def __call__(self, items: Any) -> Any:
        if type(items) is LastItem:  # a loader that doesn't batch
            return LastBatch(self.collate(items.item), items.coverage)
        last = items[-1] if type(items) is list and items else None
        if type(last) is LastItem:
            items[-1] = last.item
            return LastBatch(self.collate(items), last.coverage)
        return self.collate(items)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of a stream that belong to one of ``num_processes`` processes.

    Every process reads the whole stream, in rounds of ``batch_size`` samples per process (or of ``batch_size``
    altogether with ``split_batches``), and keeps its part. A last round that is incomplete is completed with
    samples of the first round, or left out with ``drop_last``.

    Raises:
        PreparationError: ``split_batches`` with a batch size that can't be cut into ``num_processes`` equal parts.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size % num_processes != 0:
            raise PreparationError(
                f"split_batches=True cuts each batch of {batch_size} into {num_processes} equal parts (one per "
                f"process). Use a batch size that is a multiple of {num_processes}, or split_batches=False."
            )
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.num_skipped = 0  # samples of the stream that a pass throws away before its first round
        self.first_round: Callable[[], list[Any]] | None = None  # reads it again, for a pass that began later

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``; the stream is told."""
        self.epoch = epoch
        forward = getattr(self.dataset, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    @property
    def samples_per_round(self) -> int:
        """How many samples all processes take at once."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        # Documented: the samples of one process, counted in rounds of batch_size per process in both modes.
        per_round = self.batch_size * self.num_processes
        rounds, rest = divmod(len(self.dataset), per_round)
        return (rounds + (1 if rest and not self.drop_last else 0)) * self.batch_size

    @property
    def num_rounds(self) -> int:
        """How many batches each process gets, where the stream knows its length."""
        rounds, rest = divmod(len(self.dataset), self.samples_per_round)
        return rounds + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        self.seed_generator()
        for item in self.draw():
            yield item.item if type(item) is LastItem else item

    def seed_generator(self) -> None:
        """A generator of the stream starts from the epoch, unless the stream has an epoch of its own."""
        if getattr(self.dataset, "set_epoch", None) is None:
            generator = getattr(self.dataset, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self.epoch)

    def draw(self) -> Iterator[Any]:
        """The samples of this process; the last one of a completed round comes as a :class:`LastItem`."""
        total = self.samples_per_round
        size = total // self.num_processes
        start = self.process_index * size
        first: list[Any] = []
        stream = iter(self.dataset)
        if self.num_skipped:
            stream = islice(stream, self.num_skipped, None)
        while dealt := list(islice(stream, total)):
            first = first or dealt
            if len(dealt) == total:
                yield from dealt[start : start + size]
            elif not self.drop_last:
                num_real = len(dealt)
                if self.first_round is not None:
                    first = self.first_round()
                completed = dealt + [first[added % len(first)] for added in range(total - num_real)]
                real = tuple(min(max(num_real - share * size, 0), size) for share in range(self.num_processes))
                coverage = BatchCoverage(real, (size,) * self.num_processes)
                yield from completed[start : start + size - 1]
                yield LastItem(completed[start + size - 1], coverage)


@final
class AccountedStream(IterableDataset[Any]):
    """What the loader of a sharded stream reads: the samples of its share, with the account of the last round."""

    def __init__(self, shard: IterableDatasetShard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return self.shard.draw()


@final
class StreamFrom(IterableDataset[Any]):
    """``dataset`` without its first ``num_samples`` samples, which are read and thrown away."""

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self.dataset = dataset
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.num_samples, None)
