"""The order of the samples in an epoch, and how to repeat and resume it.

The order is decided by the user's sampler. A prepared loader records the states that the sampler drew from when the
epoch began (:class:`Order`), and can start at any sample (:func:`batches_from`). With both, another rank, or another
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
    """The valid rows and all rows of the batch of each data-parallel rank, in order; valid rows come first.

    Every rank knows the coverage of all ranks, so that gathered rows can be cut without communication.
    """

    valid: tuple[int, ...]
    size: tuple[int, ...]
    num_absent: int = 0  # ranks, the last ones, that have no batch at all in this step

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have batches of different sizes, or none."""
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
        """Valid rows in the batches of all ranks together."""
        return sum(self.valid)


@lru_cache(maxsize=256)
def full_coverage(size: int, count: int) -> BatchCoverage:
    """Return the coverage of ``count`` batches of ``size`` valid rows each."""
    sizes = (size,) * count
    return BatchCoverage(sizes, sizes)


def rows_to_keep(rows: Sequence[int], coverage: BatchCoverage | None) -> list[slice] | None:
    """Return the slices of valid rows among those gathered from all ranks, ``rows`` of each; None: all rows stay.

    A sample may have several rows (all samples equally many), a rank may have been padded to the largest one, or may
    give one row altogether: then that of a rank without a valid row is left out. Rows that can't belong to the samples
    of the batch all stay.
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
# A shuffled order that is computed instead of stored, with random access
#
# The position is mapped by a Feistel network, a pseudo-random permutation of a power of two; where the image lies
# beyond the dataset it is mapped again, until it lies inside (cycle walking). Each sample comes exactly once, and only
# the keys of the network's rounds are stored.

NUM_ROUNDS: Final = 6  # even, so that the halves end with their original widths
#: Fewer samples than this are shuffled by torch.randperm: a network of so few bits has too few orders.
SMALLEST_NETWORK: Final = 1 << 16
_CHUNK: Final = 4096
# The multipliers of a 64-bit mixer (splitmix64), as the signed numbers that torch multiplies.
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@final
class Permutation:
    """One order of the numbers below ``size``, determined by ``seed``."""

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
        """Return the numbers at ``positions`` ``[...]`` of the order."""
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
            # The halves change places, and with them their widths.
            left, right = right, left ^ (_mixed(right + key) & ((1 << left_width) - 1))
            left_width, right_width = right_width, left_width
        return left << right_width | right


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mix the bits, so that every bit of the result depends on every bit of the number."""
    # Shifts of signed numbers fill the high bits with the sign: the masks clear them.
    numbers = (numbers ^ (numbers >> 30 & ((1 << 34) - 1))) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> 27 & ((1 << 37) - 1))) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> 31 & ((1 << 33) - 1))


@final
class IndexFreeSampler(Sampler[int]):
    """A sampler of each sample of ``data_source`` once, in an order determined by the seed and the epoch, without a
    list of it.

    Takes the same few kilobytes for any number of samples, and begins at any place of the epoch at once.
    ``data_seed`` is the seed; without one it is the seed that torch was given.
    """

    #: Whether the ranks have taken over rank 0's seed: from then on they need no message to begin an epoch.
    seed_is_agreed = False

    def __init__(self, data_source: Sized, data_seed: int | None = None) -> None:
        super().__init__()
        self.data_source = data_source
        self.epoch: int = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

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

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.epoch = epoch


# --------------------------------------------------------------------------------------------------
# The order of an epoch

FINGERPRINT_LENGTH = 8
NUM_AHEAD = 4096  # samples of a known order that are turned into Python numbers at a time

# Samplers whose code is known: they draw from their own generator or from torch's on the host.
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING = (SequentialSampler, BatchSampler, DistributedSampler)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of a seed and the epoch, and of nothing else.

    ``data_seed`` is the seed; without one it is the seed that torch was given.
    """

    #: Whether the ranks have taken over rank 0's seed: from then on they need no message to begin an epoch.
    seed_is_agreed = False

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch: int = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator: torch.Generator = torch.Generator()
        epoch = self.epoch
        self.generator.manual_seed(epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``."""
        self.epoch = epoch


_SEEDED = (SeedableRandomSampler, IndexFreeSampler)


class SkipBatchSampler(BatchSampler):
    """The batches of ``batch_sampler`` (or the samples of a plain sampler) without the first ``skip_batches``."""

    def __init__(self, batch_sampler: Iterable[object], skip_batches: int = 0) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> object:
        """The sampler inside the batch sampler, where it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, value: object) -> None:
        self.batch_sampler.sampler = value

    @property
    def total_length(self) -> int:
        """The number of batches with the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


def unskipped(sampler: Iterable[object]) -> tuple[Iterable[object], int]:
    """Return the sampler behind a :class:`SkipBatchSampler`, and how many batches that leaves out."""
    num_skipped = 0
    while isinstance(sampler, SkipBatchSampler):
        num_skipped += sampler.skip_batches
        sampler = sampler.batch_sampler
    return sampler, num_skipped


# -- positions in the epoch --------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ResumePosition:
    """A position in the epoch: how much of it has been assigned to all ranks together.

    ``steps`` counts the batches of one rank (and so the global batches), ``batches`` the batches of the user's batch
    sampler, ``samples`` valid samples.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0  # UNKNOWN where batches of any size were skipped by hand


UNKNOWN: Final = -1
BEGINNING = ResumePosition()


@final
class BatchInfo(NamedTuple):
    """The indices of a batch, its valid rows, and the position after it."""

    indices: Any
    coverage: BatchCoverage | None
    is_last: bool
    steps: int
    batches: int
    samples: int
    last_batch: Any  # the last batch of the user's batch sampler in this global batch
    own: Mapping[str, Any] | None = None  # this rank's own state, from which it resumes here


def num_samples_of(batch: object) -> int:
    """Return how many samples a batch of indices asks for; an index that isn't a batch is one sample."""
    try:
        return len(batch)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 1


def order_fingerprint(batch: Any) -> list[int]:
    """Return the order fingerprint of a batch: short hashes of its last sample ids, equal for equal ids."""
    if batch is None:
        return []
    try:
        ids = list(batch)[-FINGERPRINT_LENGTH:]
    except TypeError:
        ids = [batch]
    return [zlib.crc32(repr(one).encode()) for one in ids]


def same_order(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return whether two order fingerprints end equally, as far as both reach."""
    shared = min(len(mine), len(theirs))
    return shared == 0 or list(mine[-shared:]) == list(theirs[-shared:])


@final
@dataclass
class RemainingBatches:
    """The batches of a batch sampler from some position on."""

    batches: Iterator[Any]
    read_first: Callable[[], list[Any]]
    position: ResumePosition
    fingerprint: list[int] = field(default_factory=list)  # of the batch right before the position
    order: KnownOrder | None = None  # that the batches are cut from, where any part of it can be had at once

    @cached_property
    def first_batches(self) -> list[Any]:
        """The first batches of the epoch, whatever the position is."""
        return self.read_first()


class PositionedBatchSampler(BatchSampler, ABC):
    """A batch sampler that finds a position of the epoch itself, in the plan from the epoch's beginning."""

    @abstractmethod
    def remaining(self, position: ResumePosition, num_first: int) -> RemainingBatches:
        """Return the batches from ``position`` on, whose number of samples may be unknown."""

    @abstractmethod
    def plan_state(self) -> list[int]:
        """Return what decides the batches of the next epoch, beside its order."""

    @abstractmethod
    def continue_plan(self, state: Sequence[int]) -> None:
        """Use the plan ``state`` in the next pass."""

    @property
    @abstractmethod
    def mean_batch_size(self) -> int:
        """About how many samples a batch has."""


def batches_from(batch_sampler: Iterable[object], position: ResumePosition, num_first: int = 0) -> RemainingBatches:
    """Return the batches of ``batch_sampler`` from ``position`` on, without touching the data of what is skipped.

    Torch's own batch sampler is resumed at the sample, others at the batch, or where they find the position themselves.
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
    """An order of which any part can be had at once."""

    length: int
    at: Callable[[torch.Tensor], torch.Tensor]  # the indices at positions [...] of the order
    finish: Callable[[], object]  # what the sampler does when it has given its last sample

    def part(self, start: int, stop: int) -> list[Any]:
        """Return the indices at positions ``start`` to ``stop``, fewer at the end of the order."""
        return self.at(torch.arange(start, max(min(stop, self.length), start), device="cpu")).tolist()

    def in_batches(self, start: int, stop: int, size: int) -> list[list[Any]]:
        """Return the same, cut into batches of ``size``."""
        indices = self.part(start, stop)
        return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


def known_order(sampler: object) -> KnownOrder | None:
    """Return the order that ``sampler`` begins now, if its code is known and any part of it can be drawn alone.

    This draws what the sampler would draw.
    """
    if type(sampler) is SequentialSampler:
        return KnownOrder(len(sampler), lambda positions: positions, lambda: None)
    if type(sampler) is IndexFreeSampler:
        return KnownOrder(len(sampler), sampler.order().at, partial(sampler.set_epoch, sampler.epoch + 1))
    if not isinstance(sampler, RandomSampler) or type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return None
    if not _is_permutation(sampler):
        return None
    generator, seedable = sampler.generator, sampler if isinstance(sampler, SeedableRandomSampler) else None
    if seedable is not None:
        if generator is None:
            generator = seedable.generator = torch.Generator()
        generator.manual_seed(seedable.epoch + seedable.initial_seed)
    elif generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    size = sampler.num_samples
    indices = torch.randperm(size, generator=generator)
    next_epoch = 0 if seedable is None else seedable.epoch + 1

    def finish() -> None:
        torch.randperm(size, generator=generator)  # torch's sampler draws one more order at its end
        if seedable is not None:
            seedable.set_epoch(next_epoch)

    # Only the part that is needed becomes Python numbers: of a long order, all of them would cost more than it.
    return KnownOrder(size, lambda positions: indices[positions], finish)


def _is_permutation(sampler: RandomSampler) -> bool:
    size = sampler.num_samples
    return not sampler.replacement and size == len(sampler.data_source) and size > 0


def _batches_of_known_order(
    batch_sampler: BatchSampler, order: KnownOrder, position: ResumePosition, num_first: int
) -> RemainingBatches:
    size = batch_sampler.batch_size
    stop = min(position.samples, order.length)
    before = order.part(max(stop - min(size, FINGERPRINT_LENGTH), 0), stop)
    if batch_sampler.drop_last:
        order = replace(order, length=order.length - order.length % size)
    per_chunk = size * max(NUM_AHEAD // size, 1)

    def batches() -> Iterator[Sequence[object]]:
        for start in range(position.samples, order.length, per_chunk):
            yield from order.in_batches(start, start + per_chunk, size)
        order.finish()

    return RemainingBatches(
        batches(),
        lambda: order.in_batches(0, num_first * size, size),
        position,
        order_fingerprint(before),
        order,
    )


# -- the state from which an epoch's order is drawn --------------------------------------------------------


def samplers_of(root: object) -> list[object]:
    """Return ``root`` and the samplers inside it, from the outermost on."""
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
    """The states from which the order of an epoch is drawn, as a checkpoint keeps them."""

    streams: Mapping[str, Any]  # of the host, by name
    seed: int
    epoch: int
    generator: torch.Tensor
    sampler: Any  # the user's own, where that keeps a state
    sample_seed: int
    plan: list[int]  # of batches that depend on more than the order of the samples
    dataset: Any  # a stream's own, where that keeps a state
    rank: list[int] | None  # of the only rank, and the number of ranks, that can use the stream's state


@final
class Order:
    """The state that the order of an epoch depends on, for one loader.

    ``capture`` records it just before the sampler begins; ``starting_from`` enters a context in which a sampler begins
    as it did then.
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
        self.seedable: SeedableRandomSampler | IndexFreeSampler | None = next(
            (sampler for sampler in samplers if isinstance(sampler, _SEEDED)), None
        )
        self.planned: PositionedBatchSampler | None = next(
            (sampler for sampler in samplers if isinstance(sampler, PositionedBatchSampler)), None
        )
        foreign = [sampler for sampler in samplers if not isinstance(sampler, (PositionedBatchSampler, *ours))]
        self.stateful: Any = next((sampler for sampler in foreign if _has_state(sampler)), None)
        self.streams: tuple[str, ...] = _streams_of(foreign)
        self._torch_samplers: list[Any] = [
            sampler
            for sampler in foreign
            if type(sampler) in _DRAW_FROM_TORCH and getattr(sampler, "generator", None) is None
        ]
        self.sample_seed = sample_seed

    @property
    def is_random(self) -> bool:
        """Whether ranks could draw different orders, or read the same sample differently."""
        return bool(self.streams) or any(part is not None for part in (self.generator, self.seedable, self.sample_seed))

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks must compare their random state; a shared seed is compared only once."""
        is_known = self.seedable is not None and self.seedable.seed_is_agreed
        others = bool(self.streams) or self.stateful is not None or self.sample_seed is not None
        return self.is_random and (others or not is_known)

    def note_agreement(self) -> None:
        """Note that the ranks have compared their random state."""
        if self.seedable is not None:
            self.seedable.seed_is_agreed = True

    def capture(self) -> OrderState:
        """Return the current states that the order is drawn from."""
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
        """Set the sampler's own generator, seed and state to those of ``state``."""
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
        """Enter a context in which an iteration over the sampler begins as in the epoch of ``state``."""
        self.adopt(state)
        return host_streams(state.get("streams", {}))

    def starting_as_on_main(self, main: OrderState, mine: OrderState) -> AbstractContextManager[None]:
        """Enter a context in which an iteration begins as on rank 0.

        ``main`` is rank 0's state, ``mine`` this rank's.
        The order is drawn from the same streams on every rank: a stream whose state equals rank 0's is used as it is.
        One that differs is replaced by rank 0's inside of the context, after torch's samplers' draws were made from
        this rank's own stream.
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
    """Draw from torch's stream what an iteration over a sampler of torch's draws when it begins."""
    if type(sampler) is RandomSampler:
        torch.empty((), dtype=torch.int64).random_()  # the seed of a generator of its own
    else:
        next(iter(sampler), None)


def _has_state(sampler: object) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _streams_of(samplers: Sequence[object]) -> tuple[str, ...]:
    """Return the host streams that the samplers may draw from when they begin."""
    streams: tuple[str, ...] = ()
    for sampler in samplers:
        kind = type(sampler)
        if kind in _DRAW_NOTHING or kind in _SEEDED or kind.__module__ == "torchdata.stateful_dataloader.sampler":
            continue
        if kind not in _DRAW_FROM_TORCH:
            return ("torch", "python", "numpy")
        if getattr(sampler, "generator", None) is None:
            streams = ("torch",)
    return streams
