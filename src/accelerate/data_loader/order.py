"""In which order an epoch visits the samples, and how that order can be begun again.

The order belongs to the user's sampler. What a prepared loader adds is knowledge: the states that the
sampler drew from when the epoch began (:class:`Order`), and a way in at any sample (:func:`enter`). With
both, another rank, or another run, has the same order without asking the sampler for more than it does
anyway.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from accelerate.seeding import capture_host_streams, host_streams, same_stream_state

from .coverage import BatchCoverage
from .index_free import IndexFreeSampler
from .sample_streams import SampleSeed

NUM_WITNESSES = 8
NUM_AHEAD = 4096  # samples of a known order that are turned into Python numbers at a time

# Samplers whose code is known: what they draw, they draw from their own generator or from torch's on the host.
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
        self.epoch = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        epoch = self.epoch
        self.generator.manual_seed(epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``."""
        self.epoch = epoch


_SEEDED = (SeedableRandomSampler, IndexFreeSampler)


class SkipBatchSampler(BatchSampler):
    """The batches of ``batch_sampler`` (or the samples of a plain sampler) without the first ``skip_batches``."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler inside the batch sampler, where it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        self.batch_sampler.sampler = value

    @property
    def total_length(self) -> int:
        """The number of batches with the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


def unskipped(sampler: Any) -> tuple[Any, int]:
    """The sampler behind a :class:`SkipBatchSampler`, and how many batches that leaves out."""
    num_skipped = 0
    while isinstance(sampler, SkipBatchSampler):
        num_skipped += sampler.skip_batches
        sampler = sampler.batch_sampler
    return sampler, num_skipped


# -- a place in the epoch ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Place:
    """How much of the epoch has been dealt to all ranks together.

    ``rounds`` counts the batches of one rank, ``groups`` the batches of the user's batch sampler, ``samples``
    real samples.
    """

    rounds: int = 0
    groups: int = 0
    samples: int = 0


BEGINNING = Place()


@final
class Drawn(NamedTuple):
    """What is known about a batch when it is drawn, and holds once it has been delivered."""

    indices: Any
    coverage: BatchCoverage | None
    is_last: bool
    rounds: int
    groups: int
    samples: int
    last_group: Any  # the batch of the user's batch sampler that was dealt last in this round
    own: Mapping[str, Any] | None = None  # what only this rank knows, and needs to go on from here


def num_samples_of(group: Any) -> int:
    """How many samples a batch of indices asks for; an index that isn't a batch is one sample."""
    try:
        return len(group)
    except TypeError:
        return 1


def witnesses_of(group: Any) -> list[int]:
    """Short hashes of the last sample ids of a batch: equal for equal ids."""
    if group is None:
        return []
    try:
        ids = list(group)[-NUM_WITNESSES:]
    except TypeError:
        ids = [group]
    return [zlib.crc32(repr(one).encode()) for one in ids]


def agree(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether two lists of witnesses end equally, as far as both reach."""
    shared = min(len(mine), len(theirs))
    return shared == 0 or list(mine[-shared:]) == list(theirs[-shared:])


@final
@dataclass
class Entered:
    """The batches of a batch sampler from some place on."""

    groups: Iterator[Any]
    head: list[Any]  # the first groups of the epoch, wherever it was entered
    place: Place
    before: list[int] = field(default_factory=list)  # witnesses of what lies right before the place


def enter(batch_sampler: Any, place: Place, num_head: int = 0) -> Entered:
    """The groups of ``batch_sampler`` from ``place`` on; what lies before is skipped without touching the data.

    Torch's own batch sampler is entered at the sample, others at the batch.
    """
    if type(batch_sampler) is BatchSampler:
        order = known_order(batch_sampler.sampler)
        if order is not None:
            return _enter_known(batch_sampler, order, place, num_head)
        if place != BEGINNING:
            return _enter_at_sample(batch_sampler, place, num_head)
    groups = iter(batch_sampler)
    head = list(islice(groups, num_head))
    rest = chain(head, groups) if head else groups
    skipped = deque(islice(rest, place.groups), maxlen=1)
    return Entered(rest, head, place, witnesses_of(skipped[-1]) if skipped else [])


def _enter_at_sample(batch_sampler: BatchSampler, place: Place, num_head: int) -> Entered:
    size = batch_sampler.batch_size
    indices = iter(batch_sampler.sampler)
    first = list(islice(indices, num_head * size))
    rest = chain(first, indices)
    last = deque(islice(rest, place.samples), maxlen=min(size, NUM_WITNESSES))

    def groups() -> Iterator[list[Any]]:
        while group := list(islice(rest, size)):
            if len(group) == size or not batch_sampler.drop_last:
                yield group

    head = [first[start : start + size] for start in range(0, len(first), size)]
    return Entered(groups(), head, place, witnesses_of(last))


# -- orders that are known as a whole ----------------------------------------------------------------------


@final
@dataclass(frozen=True)
class KnownOrder:
    """An order of which any part can be had at once."""

    length: int
    part: Callable[[int, int], list[Any]]
    finish: Callable[[], object]  # what the sampler does when it has given its last sample


def known_order(sampler: Any) -> KnownOrder | None:
    """The order that ``sampler`` begins now, where its code is known and no sample depends on drawing the others.

    What the sampler would draw has been drawn.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return KnownOrder(len(sampler), lambda start, stop: list(range(start, stop)), lambda: None)
    if kind is IndexFreeSampler:
        order = sampler.order()
        return KnownOrder(
            len(sampler),
            lambda start, stop: order.at(start, stop).tolist(),
            partial(sampler.set_epoch, sampler.epoch + 1),
        )
    if kind not in (RandomSampler, SeedableRandomSampler) or not _is_permutation(sampler):
        return None
    generator = sampler.generator
    if kind is SeedableRandomSampler:
        if generator is None:
            generator = sampler.generator = torch.Generator()
        generator.manual_seed(sampler.epoch + sampler.initial_seed)
    elif generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    size = sampler.num_samples
    indices = torch.randperm(size, generator=generator)
    next_epoch = sampler.epoch + 1 if kind is SeedableRandomSampler else None

    def finish() -> None:
        torch.randperm(size, generator=generator)  # torch's sampler draws one more order at its end
        if next_epoch is not None:
            sampler.set_epoch(next_epoch)

    # Only the part that is needed becomes Python numbers: of a long order, all of them would cost more than it.
    return KnownOrder(size, lambda start, stop: indices[start:stop].tolist(), finish)


def _is_permutation(sampler: RandomSampler) -> bool:
    size = sampler.num_samples
    return not sampler.replacement and size == len(sampler.data_source) and size > 0


def _enter_known(batch_sampler: BatchSampler, order: KnownOrder, place: Place, num_head: int) -> Entered:
    size, length, part = batch_sampler.batch_size, order.length, order.part
    end = length - length % size if batch_sampler.drop_last else length
    per_chunk = size * max(NUM_AHEAD // size, 1)

    def groups() -> Iterator[list[Any]]:
        for start in range(place.samples, end, per_chunk):
            chunk = part(start, min(start + per_chunk, end))
            for position in range(0, len(chunk), size):
                yield chunk[position : position + size]
        order.finish()

    first = part(0, min(num_head * size, end)) if num_head else []
    head = [first[start : start + size] for start in range(0, len(first), size)]
    stands = min(place.samples, length)
    return Entered(groups(), head, place, witnesses_of(part(max(stands - min(size, NUM_WITNESSES), 0), stands)))


# -- how an epoch's order begins ---------------------------------------------------------------------------


def samplers_of(root: Any) -> list[Any]:
    """``root`` and the samplers inside it, from the outermost on."""
    found: list[Any] = []
    waiting = [root]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is known for known in found):
            continue
        found.append(sampler)
        waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


@final
class Order:
    """What the order of an epoch depends on, for one loader.

    ``capture`` takes it down just before the sampler begins; ``begun`` gives a block in which a sampler begins
    as it did then.
    """

    def __init__(
        self,
        root: Any,
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
        foreign = [sampler for sampler in samplers if not isinstance(sampler, ours)]
        self.stateful: Any = next((sampler for sampler in foreign if _has_state(sampler)), None)
        self.streams = _streams_of(foreign)
        self._torch_samplers = [
            sampler for sampler in foreign if type(sampler) in _DRAW_FROM_TORCH and sampler.generator is None
        ]
        self.sample_seed = sample_seed

    @property
    def is_random(self) -> bool:
        """Whether ranks could draw different orders, or read the same sample differently."""
        return bool(self.streams) or any(part is not None for part in (self.generator, self.seedable, self.sample_seed))

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks have to compare what they begin with; a seed that they share is the same in every epoch."""
        is_known = self.seedable is not None and self.seedable.seed_is_agreed
        others = bool(self.streams) or self.stateful is not None or self.sample_seed is not None
        return self.is_random and (others or not is_known)

    def note_agreement(self) -> None:
        """The ranks have compared what they begin with."""
        if self.seedable is not None:
            self.seedable.seed_is_agreed = True

    def capture(self) -> dict[str, Any]:
        """The states that the order is drawn from, now."""
        state: dict[str, Any] = {}
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
        return state

    def adopt(self, state: Mapping[str, Any]) -> None:
        """The sampler's own generator, seed and state are those of ``state``."""
        if self.seedable is not None and "seed" in state:
            self.seedable.initial_seed = state["seed"]
            self.seedable.set_epoch(state["epoch"])
        if self.generator is not None and state.get("generator") is not None:
            self.generator.set_state(state["generator"])
        if self.stateful is not None and state.get("sampler") is not None:
            self.stateful.load_state_dict(state["sampler"])
        if self.sample_seed is not None and "sample_seed" in state:
            self.sample_seed.value = state["sample_seed"]

    def begun(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A block in which an iteration over the sampler begins as in the epoch that ``state`` was taken from."""
        self.adopt(state)
        return host_streams(state.get("streams", {}))

    def begun_as_on(self, main: Mapping[str, Any], mine: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A block in which an iteration begins as on rank 0, whose captured state is ``main``; this rank's is ``mine``.

        Every rank consumes what the order is drawn from: a stream that stands where rank 0's stands is drawn from as
        it is. In place of one that stands elsewhere rank 0's is lent to the block, and what torch's samplers draw is
        drawn from this rank's own stream before.
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


def _consume(sampler: Any) -> None:
    """Draw from torch's stream what an iteration over a sampler of torch's draws when it begins."""
    if type(sampler) is RandomSampler:
        torch.empty((), dtype=torch.int64).random_()  # the seed of a generator of its own
    else:
        next(iter(sampler), None)


def _has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _streams_of(samplers: Sequence[Any]) -> tuple[str, ...]:
    """The host streams that the samplers may draw from when they begin."""
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
