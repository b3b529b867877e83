"""In which order an epoch visits the samples, and how that order can be begun again.

The order belongs to the user's sampler. What a prepared loader adds is knowledge: the states that the
sampler drew from when the epoch began (:class:`Order`), and a way in at any sample (:func:`enter`). With
both, another rank, or another run, has the same order without asking the sampler for more than it does
anyway.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from accelerate.seeding import capture_host_streams, host_streams

from .coverage import BatchCoverage

NUM_WITNESSES = 8

# Samplers whose code is known: what they draw, they draw from their own generator or from torch's on the host.
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAW_NOTHING = (SequentialSampler, BatchSampler, DistributedSampler)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of a seed and the epoch, and of nothing else.

    ``data_seed`` is the seed; without one it is the seed that torch was given.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``."""
        self.epoch = epoch


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
    if place == BEGINNING:
        groups = iter(batch_sampler)
        head = list(islice(groups, num_head))
        return Entered(chain(head, groups) if head else groups, head, place)
    if type(batch_sampler) is BatchSampler:
        return _enter_at_sample(batch_sampler, place, num_head)
    groups = iter(batch_sampler)
    head = list(islice(groups, num_head))
    rest = chain(head, groups)
    skipped = deque(islice(rest, place.groups), maxlen=1)
    return Entered(rest, head, place, witnesses_of(skipped[-1]) if skipped else [])


def _enter_at_sample(batch_sampler: BatchSampler, place: Place, num_head: int) -> Entered:
    size = batch_sampler.batch_size
    first, last, rest = _seek(batch_sampler.sampler, place.samples, num_head * size, min(size, NUM_WITNESSES))

    def groups() -> Iterator[list[Any]]:
        while group := list(islice(rest, size)):
            if len(group) == size or not batch_sampler.drop_last:
                yield group

    head = [first[start : start + size] for start in range(0, len(first), size)]
    return Entered(groups(), head, place, witnesses_of(last))


def _seek(sampler: Any, start: int, num_first: int, num_last: int) -> tuple[list[Any], list[Any], Iterator[Any]]:
    """Some samples of the beginning, some right before ``start``, and all from ``start`` on."""
    if _is_permutation(sampler):
        order, rest = _permutation(sampler, start)
        return order[:num_first].tolist(), order[max(start - num_last, 0) : start].tolist(), rest
    indices = iter(sampler)
    first = list(islice(indices, num_first))
    rest = chain(first, indices)
    return first, list(deque(islice(rest, start), maxlen=num_last)), rest


def _is_permutation(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
        and sampler.num_samples > 0
    )


def _permutation(sampler: RandomSampler, start: int) -> tuple[torch.Tensor, Iterator[int]]:
    """The order that torch's random sampler draws, and its samples from ``start`` on.

    It draws what the sampler would draw, but the samples before ``start`` stay in the tensor: making a Python
    number of each would cost more than drawing the order.
    """
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(sampler.num_samples, generator=generator)

    def rest() -> Iterator[int]:
        yield from order[start:].tolist()
        torch.randperm(sampler.num_samples, generator=generator)  # the sampler draws one more order at its end

    return order, rest()


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

    def __init__(self, root: Any, generator: torch.Generator | None, ours: tuple[type, ...] = ()) -> None:
        samplers = samplers_of(root)
        generators = [getattr(sampler, "generator", None) for sampler in samplers]
        own = [found for found in generators if isinstance(found, torch.Generator)]
        self.generator: torch.Generator | None = generator or (own[0] if own else None)
        self.seedable: SeedableRandomSampler | None = next(
            (sampler for sampler in samplers if isinstance(sampler, SeedableRandomSampler)), None
        )
        foreign = [sampler for sampler in samplers if not isinstance(sampler, ours)]
        self.stateful: Any = next((sampler for sampler in foreign if _has_state(sampler)), None)
        self.streams = _streams_of(foreign)

    @property
    def is_random(self) -> bool:
        """Whether ranks could draw different orders."""
        return bool(self.streams) or self.generator is not None or self.seedable is not None

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

    def begun(self, state: Mapping[str, Any], left_behind: Sequence[str] = ()) -> AbstractContextManager[None]:
        """A block in which an iteration over the sampler begins as in the epoch that ``state`` was taken from."""
        self.adopt(state)
        return host_streams(state.get("streams", {}), left_behind=left_behind)


def _has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _streams_of(samplers: Sequence[Any]) -> tuple[str, ...]:
    """The host streams that the samplers may draw from when they begin."""
    streams: tuple[str, ...] = ()
    for sampler in samplers:
        kind = type(sampler)
        if kind in _DRAW_NOTHING or kind is SeedableRandomSampler:
            continue
        if kind not in _DRAW_FROM_TORCH:
            return ("torch", "python", "numpy")
        if getattr(sampler, "generator", None) is None:
            streams = ("torch",)
    return streams
