"""The order of the samples in an epoch: repeat it and resume in it.

The user's sampler decides the order. A prepared loader records the random states from which the sampler draws at the
start of the epoch (:class:`Order`), and can start at any sample (:func:`batches_from`). So another rank, or another
run, gets the same order.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, islice
from typing import Any, Final, NamedTuple, TypedDict, cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ..distributed.random import capture_host_streams, host_streams, same_stream_state
from .random_streams import SampleSeed


@final
@dataclass(frozen=True)
class BatchCoverage:
    """The numbers of valid rows and of all rows in each data-parallel rank's batch; valid rows come first.

    Every rank knows the coverage of all ranks, so padding is removed from gathered rows without communication.
    """

    valid: tuple[int, ...]
    size: tuple[int, ...]
    num_absent: int = 0  # how many of the last ranks have no batch in this step

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have batches of different sizes, or no batch."""
        return self.num_absent > 0 or min(self.size) != max(self.size)

    def of_present(self) -> BatchCoverage:
        """Return the coverage of the ranks that have a batch."""
        present = len(self.size) - self.num_absent
        return BatchCoverage(self.valid[:present], self.size[:present]) if self.num_absent else self

    @property
    def is_complete(self) -> bool:
        """Whether all rows are valid."""
        return self.valid == self.size

    @property
    def num_samples(self) -> int:
        """The number of valid rows in the batches of all ranks together."""
        return sum(self.valid)


@lru_cache(maxsize=256)
def full_coverage(size: int, count: int) -> BatchCoverage:
    """Return the coverage of ``count`` batches of ``size`` valid rows each."""
    sizes = (size,) * count
    return BatchCoverage(sizes, sizes)


def rows_to_keep(rows: Sequence[int], coverage: BatchCoverage | None) -> list[slice] | None:
    """Return the slices of valid rows in a gather of ``rows`` rows from each rank; None to keep all rows.

    A sample may have several rows (the same number for all samples), and ranks may be padded to the largest rank. If
    each rank has one row, the rows of ranks without a valid row are left out. If the rows can't belong to the samples
    of the batch, all are kept.
    """
    if coverage is None or len(rows) != len(coverage.size):
        return None
    valid, size, largest = coverage.valid, coverage.size, max(coverage.size)
    if coverage.is_complete and min(size) == largest:
        return None
    rows_per_sample = next((number // rank_size for number, rank_size in zip(rows, size, strict=True) if rank_size), 0)
    if not rows_per_sample or any(
        number != rank_size * rows_per_sample for number, rank_size in zip(rows, size, strict=True)
    ):
        if len(set(rows)) > 1:
            return None
        if rows[0] == 1:
            valid, rows_per_sample = tuple(min(number, 1) for number in valid), 1
        elif largest and rows[0] % largest == 0:
            rows_per_sample = rows[0] // largest
        else:
            return None
    starts = [0, *accumulate(rows)]
    return [slice(start, start + number * rows_per_sample) for start, number in zip(starts, valid, strict=False)]


# --------------------------------------------------------------------------------------------------
# A shuffled order with random access that is computed instead of stored
#
# A Feistel network, a pseudo-random permutation of a power of two, maps each position. If the image is outside of the
# dataset, it is mapped again until it is inside (cycle walking). Each sample comes exactly once, and only the keys of
# the network's rounds are stored.

NUM_ROUNDS: Final = 6  # even, so that the halves end with their original widths
#: Fewer samples than this are shuffled by torch.randperm, because so small a network has too few orders.
SMALLEST_NETWORK: Final = 1 << 16
_CHUNK: Final = 4096
# The multipliers of splitmix64, a 64-bit mixer, as torch's signed integers.
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@final
class Permutation:
    """A permutation of the numbers below ``size``, determined by ``seed``."""

    def __init__(self, size: int, seed: int) -> None:
        if not 0 <= size < 1 << 62:
            raise ValueError(f"A permutation of {size} numbers can't be made: at least 0, below 2 to the power of 62.")
        self.size = size
        self._shuffled: torch.Tensor | None = None
        if size < SMALLEST_NETWORK:
            self._shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(seed % (1 << 63)))
            return
        num_bits = (size - 1).bit_length()
        self._widths = (num_bits // 2, num_bits - num_bits // 2)
        keys = hashlib.blake2b(f"{size}/{seed}".encode(), digest_size=8 * NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(keys[8 * n : 8 * n + 8], "little", signed=True) for n in range(NUM_ROUNDS)]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers at ``positions`` ``[...]`` of the permutation."""
        if self._shuffled is not None:
            return self._shuffled[positions]
        image = self._through(positions)
        while (outside := image >= self.size).any():
            image[outside] = self._through(image[outside])
        return image

    def _through(self, numbers: torch.Tensor) -> torch.Tensor:
        left_width, right_width = self._widths
        left, right = numbers >> right_width, numbers & ((1 << right_width) - 1)
        for key in self._keys:
            # Swap the halves and their widths.
            left, right = right, left ^ (_mixed(right + key) & ((1 << left_width) - 1))
            left_width, right_width = right_width, left_width
        return left << right_width | right


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mix the bits, so that every bit of the result depends on every bit of the input."""
    # Shifts of signed numbers fill the high bits with the sign: the masks clear them.
    numbers = (numbers ^ (numbers >> 30 & ((1 << 34) - 1))) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> 27 & ((1 << 37) - 1))) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> 31 & ((1 << 33) - 1))


class SeededSampler(Sampler[int], ABC):
    """A sampler whose order depends only on a seed (default: torch's initial seed) and the epoch."""

    #: Whether the ranks have copied rank 0's seed; after that they need no communication to begin an epoch.
    seed_is_agreed = False

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch: int = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


@final
class IndexFreeSampler(SeededSampler):
    """A random sampler that computes its order from the seed and the epoch, without storing it.

    It draws each sample of ``data_source`` once. It needs a few kilobytes for any number of samples, and starts at any
    position of the epoch at once. ``data_seed`` is the seed (default: torch's initial seed).
    """

    def __init__(self, data_source: Sized, data_seed: int | None = None) -> None:
        super().__init__(data_seed=data_seed)
        self.data_source = data_source

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        order, epoch = self.order(), self.epoch
        for start in range(0, len(self), _CHUNK):
            positions = torch.arange(start, min(start + _CHUNK, len(self)), device="cpu")
            yield from cast("list[int]", order.at(positions).tolist())
        self.set_epoch(epoch + 1)

    def order(self) -> Permutation:
        """Return the order of the epoch."""
        return Permutation(len(self.data_source), self.initial_seed * 1_000_003 + self.epoch)


# --------------------------------------------------------------------------------------------------
# The order of an epoch

FINGERPRINT_LENGTH = 8
NUM_AHEAD = 4096  # samples of a known order that are converted to Python numbers at a time


class SeedableRandomSampler(SeededSampler, RandomSampler):
    """A random sampler whose order depends only on a seed and the epoch.

    ``data_seed`` is the seed (default: torch's initial seed).
    """

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator: torch.Generator = torch.Generator()
        epoch = self.epoch
        self.generator.manual_seed(epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(epoch + 1)


# Samplers whose code is known: they draw from their own generator or from torch's on the host.
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING = (SequentialSampler, BatchSampler, DistributedSampler, SeedableRandomSampler, IndexFreeSampler)


class OverBatchSampler(BatchSampler, ABC):
    """Another order of the batches of ``batch_sampler``."""

    def __init__(self, batch_sampler: Iterable[object]) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.batch_sampler: Any = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> object:
        """The sampler inside the batch sampler, if there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, value: object) -> None:
        self.batch_sampler.sampler = value

    @property
    def total_length(self) -> int:
        """The number of batches of the batch sampler."""
        return len(self.batch_sampler)


class SkipBatchSampler(OverBatchSampler):
    """The batches of ``batch_sampler`` (or the samples of a plain sampler) without the first ``skip_batches``."""

    def __init__(self, batch_sampler: Iterable[object], skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


def unskipped(sampler: Iterable[object]) -> tuple[Iterable[object], int]:
    """Return the sampler inside :class:`SkipBatchSampler`, and the number of batches it skips."""
    num_skipped = 0
    while isinstance(sampler, SkipBatchSampler):
        num_skipped += sampler.skip_batches
        sampler = sampler.batch_sampler
    return sampler, num_skipped


# -- positions in the epoch --------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ResumePosition:
    """A position in the epoch: how much has been assigned to all ranks together.

    ``steps`` counts the batches of one rank (and so the global batches), ``batches`` the batches of the user's batch
    sampler, ``samples`` valid samples.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0  # UNKNOWN if the user skipped batches of unknown size


UNKNOWN: Final = -1
BEGINNING = ResumePosition()


@final
class BatchInfo(NamedTuple):
    """The indices of a batch, its coverage, and the position after it."""

    indices: Any
    coverage: BatchCoverage | None
    is_last: bool
    steps: int
    batches: int
    samples: int
    last_batch: Any  # the last batch of the user's batch sampler in this global batch
    own: Mapping[str, Any] | None = None  # this rank's own state, from which it resumes here


def num_samples_of(batch: object) -> int:
    """Return the number of samples in a batch of indices; a single index is one sample."""
    try:
        return len(batch)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 1


def order_fingerprint(batch: Any) -> list[int]:
    """Return the order fingerprint of a batch: short hashes of its last sample ids."""
    if batch is None:
        return []
    try:
        ids = list(batch)[-FINGERPRINT_LENGTH:]
    except TypeError:
        ids = [batch]
    return [zlib.crc32(repr(one).encode()) for one in ids]


def same_order(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return whether two order fingerprints have equal ends, up to the shorter length."""
    shared = min(len(mine), len(theirs))
    return shared == 0 or list(mine[-shared:]) == list(theirs[-shared:])


@final
@dataclass
class RemainingBatches:
    """The batches of a batch sampler from a position on."""

    batches: Iterator[Any]
    read_first: Callable[[], list[Any]]
    position: ResumePosition
    fingerprint: list[int] = field(default_factory=list)  # of the batch right before the position
    order: KnownOrder | None = None  # the order of the batches' samples, if it has random access

    def draw_again(self, order_state: OrderState) -> bool:
        """Draw the batches after the position that the saved pass had drawn; note in ``order_state`` what is drawn.

        Return whether the newest of them is equal to the saved one, as far as known.
        """
        num_drawn, newest = order_state.pop("drawn", 0), order_state.pop("newest", [])
        if self.order is not None:  # it makes no random draws after its beginning
            return True
        batches = _counted(self.batches, self.position.batches, order_state)
        self.batches = chain(list(islice(batches, max(num_drawn - self.position.batches, 0))), batches)
        return order_state.get("drawn") != num_drawn or same_order(newest, order_fingerprint(order_state.get("newest")))

    @cached_property
    def first_batches(self) -> list[Any]:
        """The first batches of the epoch, for any position."""
        return self.read_first()


def _counted(batches: Iterable[object], number: int, order_state: OrderState) -> Iterator[object]:
    """Yield ``batches``; note in ``order_state`` the newest one, and how many the sampler was asked for."""
    for batch in batches:
        number += 1
        order_state.update(drawn=number, newest=batch)
        yield batch
    order_state["drawn"] = number + 1  # a sampler may also draw at its end


class PositionedBatchSampler(BatchSampler, ABC):
    """A batch sampler that resumes at a position itself, with the epoch's plan of batches."""

    @abstractmethod
    def remaining(self, position: ResumePosition, num_first: int) -> RemainingBatches:
        """Return the batches from ``position`` on; its number of samples may be unknown."""

    @abstractmethod
    def plan_state(self) -> list[int]:
        """Return the values that, with the order, determine the batches of the next epoch."""

    @abstractmethod
    def continue_plan(self, state: Sequence[int]) -> None:
        """Use the plan ``state`` in the next pass."""

    @property
    @abstractmethod
    def mean_batch_size(self) -> int:
        """The approximate number of samples per batch."""


def batches_from(batch_sampler: Iterable[object], position: ResumePosition, num_first: int = 0) -> RemainingBatches:
    """Return the batches of ``batch_sampler`` from ``position`` on, without reading skipped samples.

    Torch's own batch sampler resumes at the sample, a PositionedBatchSampler by itself, and others at the batch.
    """
    if isinstance(batch_sampler, PositionedBatchSampler):
        return batch_sampler.remaining(position, num_first)
    if type(batch_sampler) is BatchSampler:
        order = known_order(batch_sampler.sampler)
        if order is not None:
            return _batches_of_known_order(batch_sampler, order, position, num_first)
        if position != BEGINNING:
            return _batches_from_sample(batch_sampler, position, num_first)
    batches = iter(batch_sampler)
    first_batches = list(islice(batches, num_first))
    rest = chain(first_batches, batches) if first_batches else batches
    skipped = deque(islice(rest, position.batches), maxlen=1)
    fingerprint = order_fingerprint(skipped[-1]) if skipped else []
    return RemainingBatches(rest, lambda: first_batches, position, fingerprint)


def _batches_from_sample(batch_sampler: BatchSampler, position: ResumePosition, num_first: int) -> RemainingBatches:
    size = batch_sampler.batch_size
    indices = iter(batch_sampler.sampler)
    first = list(islice(indices, num_first * size))
    rest = chain(first, indices)
    last = deque(islice(rest, position.samples), maxlen=min(size, FINGERPRINT_LENGTH))

    def batches() -> Iterator[Sequence[object]]:
        while batch := list(islice(rest, size)):
            if len(batch) == size or not batch_sampler.drop_last:
                yield batch

    first_batches = [first[start : start + size] for start in range(0, len(first), size)]
    return RemainingBatches(batches(), lambda: first_batches, position, order_fingerprint(last))


# -- orders with random access -----------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class KnownOrder:
    """An order with random access."""

    length: int
    at: Callable[[torch.Tensor], torch.Tensor]  # the indices at positions [...] of the order
    finish: Callable[[], object]  # what the sampler does after its last sample

    def part(self, start: int, stop: int) -> list[Any]:
        """Return the indices at positions ``start`` to ``stop``; fewer at the end of the order."""
        return self.at(torch.arange(start, max(min(stop, self.length), start), device="cpu")).tolist()

    def in_batches(self, start: int, stop: int, size: int) -> list[list[Any]]:
        """Return the same indices in batches of ``size``."""
        indices = self.part(start, stop)
        return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


def known_order(sampler: object) -> KnownOrder | None:
    """Return the order that ``sampler`` begins now, if it is a known sampler with random access; else None.

    This makes the same random draws as the sampler would.
    """
    if type(sampler) is SequentialSampler:
        return KnownOrder(len(sampler), lambda positions: positions, lambda: None)
    if type(sampler) is IndexFreeSampler:
        return KnownOrder(len(sampler), sampler.order().at, partial(sampler.set_epoch, sampler.epoch + 1))
    if not isinstance(sampler, RandomSampler) or type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return None
    size = sampler.num_samples
    if sampler.replacement or size == 0 or size != len(sampler.data_source):  # not a permutation
        return None
    generator, seedable = sampler.generator, sampler if isinstance(sampler, SeedableRandomSampler) else None
    if seedable is not None:
        if generator is None:
            generator = seedable.generator = torch.Generator()
        generator.manual_seed(seedable.epoch + seedable.initial_seed)
    elif generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    indices = torch.randperm(size, generator=generator)
    next_epoch = 0 if seedable is None else seedable.epoch + 1

    def finish() -> None:
        torch.randperm(size, generator=generator)  # torch's sampler draws another order at its end
        if seedable is not None:
            seedable.set_epoch(next_epoch)

    # Only the needed part is converted to Python numbers: converting all would cost more than drawing a long order.
    return KnownOrder(size, lambda positions: indices[positions], finish)


def _batches_of_known_order(
    batch_sampler: BatchSampler, order: KnownOrder, position: ResumePosition, num_first: int
) -> RemainingBatches:
    size = batch_sampler.batch_size
    stop = min(position.samples, order.length)
    before = order.part(max(stop - min(size, FINGERPRINT_LENGTH), 0), stop)
    if batch_sampler.drop_last:
        order = replace(order, length=order.length - order.length % size)
    per_chunk = size * max(NUM_AHEAD // size, 1)

    def chunks() -> Iterator[Sequence[Sequence[object]]]:
        for start in range(position.samples, order.length, per_chunk):
            yield order.in_batches(start, start + per_chunk, size)
        order.finish()

    return RemainingBatches(
        chain.from_iterable(chunks()),
        lambda: order.in_batches(0, num_first * size, size),
        position,
        order_fingerprint(before),
        order,
    )


# -- the state that determines an epoch's order ------------------------------------------------------------


def samplers_of(root: object) -> list[object]:
    """Return ``root`` and the samplers inside it, outermost first."""
    found: list[Any] = []
    waiting = [root]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is known for known in found):
            continue
        found.append(sampler)
        waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


class OrderState(TypedDict, total=False):
    """The states that determine the order of an epoch, as saved in a checkpoint."""

    streams: Mapping[str, Any]  # of the host, by name
    seed: int
    epoch: int
    generator: torch.Tensor
    sampler: Any  # of the user's own sampler, if it has a state
    sample_seed: int
    plan: list[int]  # of a PositionedBatchSampler
    dataset: Any  # of an iterable dataset, if it has a state
    rank: list[int] | None  # the rank and number of ranks that can use the dataset's state; None: any
    drawn: int  # how often a batch was asked for, if the sampler may draw random numbers each time
    newest: Any  # the newest of these batches; in a checkpoint its fingerprint


@final
class Order:
    """The state that determines the order of an epoch, for one loader.

    ``capture`` records it just before the sampler begins; ``starting_from`` enters a context in which the sampler
    begins in the same way.
    """

    def __init__(
        self,
        root: object,
        generator: torch.Generator | None,
        ours: tuple[type, ...] = (),
        sample_seed: SampleSeed | None = None,
    ) -> None:
        samplers = samplers_of(root)
        generators = [getattr(sampler, "generator", None) for sampler in samplers]
        own = [found for found in generators if isinstance(found, torch.Generator)]
        self.generator: torch.Generator | None = generator or (own[0] if own else None)
        self.seedable: SeededSampler | None = next(
            (sampler for sampler in samplers if isinstance(sampler, SeededSampler)), None
        )
        self.planned: PositionedBatchSampler | None = next(
            (sampler for sampler in samplers if isinstance(sampler, PositionedBatchSampler)), None
        )
        foreign = [sampler for sampler in samplers if not isinstance(sampler, (PositionedBatchSampler, *ours))]
        self.stateful: Any = next((sampler for sampler in foreign if has_state(sampler)), None)
        self.streams: tuple[str, ...] = _streams_of(foreign)
        self._torch_samplers: list[Any] = [
            sampler
            for sampler in foreign
            if type(sampler) in _DRAW_FROM_TORCH and getattr(sampler, "generator", None) is None
        ]
        self.sample_seed = sample_seed

    @property
    def is_random(self) -> bool:
        """Whether ranks may draw different orders, or read the same sample differently."""
        return bool(self.streams) or any(part is not None for part in (self.generator, self.seedable, self.sample_seed))

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks must compare their random state; a shared seed is compared only once."""
        is_known = self.seedable is not None and self.seedable.seed_is_agreed
        others = bool(self.streams) or self.stateful is not None or self.sample_seed is not None
        return self.is_random and (others or not is_known)

    def note_agreement(self) -> None:
        """Record that the ranks have compared their random state."""
        if self.seedable is not None:
            self.seedable.seed_is_agreed = True

    def capture(self) -> OrderState:
        """Return the current states that determine the order."""
        state: OrderState = {}
        if self.streams:
            state["streams"] = capture_host_streams(self.streams)
        if self.seedable is not None:
            state["seed"], state["epoch"] = self.seedable.initial_seed, self.seedable.epoch
        elif self.generator is not None:
            state["generator"] = self.generator.get_state()
        if self.stateful is not None:
            state["sampler"] = self.stateful.state_dict()
        if self.sample_seed is not None:
            state["sample_seed"] = self.sample_seed.value
        if self.planned is not None:
            state["plan"] = self.planned.plan_state()
        return state

    def adopt(self, state: OrderState) -> None:
        """Set the sampler's generator, seed and own state from ``state``."""
        seed, epoch, generator = state.get("seed"), state.get("epoch"), state.get("generator")
        if self.seedable is not None and seed is not None and epoch is not None:
            self.seedable.initial_seed = seed
            self.seedable.set_epoch(epoch)
        if self.generator is not None and generator is not None:
            self.generator.set_state(generator)
        if self.stateful is not None and state.get("sampler") is not None:
            self.stateful.load_state_dict(state.get("sampler"))
        if self.sample_seed is not None and "sample_seed" in state:
            self.sample_seed.value = state["sample_seed"]
        if self.planned is not None and "plan" in state:
            self.planned.continue_plan(state["plan"])

    def starting_from(self, state: OrderState) -> AbstractContextManager[None]:
        """Enter a context in which the sampler begins as in the epoch of ``state``."""
        self.adopt(state)
        return host_streams(state.get("streams", {}))

    def starting_as_on_main(self, main: OrderState, mine: OrderState) -> AbstractContextManager[None]:
        """Enter a context in which the sampler begins as on rank 0.

        ``main`` is rank 0's state, ``mine`` this rank's. Every rank draws the order from the same streams: a stream
        with rank 0's state is used directly. One that differs is replaced by rank 0's within the context, after the
        draws of torch's samplers have been made from this rank's own stream.
        """
        self.adopt(main)
        own = mine.get("streams", {})
        lent = {
            name: state
            for name, state in main.get("streams", {}).items()
            if not same_stream_state(own.get(name), state)
        }
        if "torch" in lent:
            for sampler in self._torch_samplers:
                _consume(sampler)
        return host_streams(lent)


def _consume(sampler: Iterable[object]) -> None:
    """Make the draws from torch's stream that one of torch's samplers makes when it begins."""
    if type(sampler) is RandomSampler:
        torch.empty((), dtype=torch.int64).random_()  # the seed of its own generator
    else:
        next(iter(sampler), None)


def has_state(value: object) -> bool:
    """Return whether a sampler or a dataset can save and load a state of its own."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _streams_of(samplers: Sequence[object]) -> tuple[str, ...]:
    """Return the host streams that the samplers may draw from when they begin."""
    streams: tuple[str, ...] = ()
    for sampler in samplers:
        kind = type(sampler)
        if kind in _DRAW_NOTHING or kind.__module__ == "torchdata.stateful_dataloader.sampler":
            continue
        if kind not in _DRAW_FROM_TORCH:
            return ("torch", "python", "numpy")
        if getattr(sampler, "generator", None) is None:
            streams = ("torch",)
    return streams
