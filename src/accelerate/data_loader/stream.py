"""Reading a dataset that is a stream: one batch ahead, so that the last one is known, and from any place on."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast, final

import numpy as np
import torch
from torch.utils.data import IterDataPipe

from accelerate.nested import ignorant_find_batch_size
from accelerate.seeding import capture_host_streams, host_stream, host_streams

from .coverage import BatchCoverage, full_coverage
from .order import BEGINNING, Drawn, Place
from .position import Restored
from .shard import AccountedStream, CollateAccount, IterableDatasetShard, LastBatch, StreamFrom

if TYPE_CHECKING:
    from .prefetch import BatchFeeder

_END: Final = object()
_BEFORE_END: Final = "before_end"


class ResumeWarning(UserWarning):
    """A saved position couldn't be continued exactly; the text says why."""


@final
@dataclass(frozen=True)
class StreamSource:
    """A stream, and how it is divided between ranks."""

    dataset: Any  # an IterableDatasetShard, or what each rank reads for itself
    batch_size: int | None
    num_readers: int  # ranks that each read a stream of their own; 1 where the stream isn't divided, or divided here

    @property
    def shard(self) -> IterableDatasetShard | None:
        """The part that deals one common stream to all ranks, where there is one."""
        return self.dataset if isinstance(self.dataset, IterableDatasetShard) else None

    @property
    def base(self) -> Any:
        """The user's own stream."""
        return self.dataset if self.shard is None else self.shard.dataset

    @property
    def shares(self) -> int:
        """How many ranks the samples are divided among."""
        return self.num_readers if self.shard is None else self.shard.num_processes

    @property
    def samples_per_round(self) -> int:
        """Samples that all ranks take at once."""
        return (self.batch_size or 1) * self.num_readers if self.shard is None else self.shard.samples_per_round

    @property
    def generator(self) -> torch.Generator | None:
        """The stream's own generator, where it has one."""
        generator = getattr(self.base, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def seed_generator(self) -> None:
        """The generator of a stream that is dealt here starts from the epoch."""
        if self.shard is not None:
            self.shard.seed_generator()

    @property
    def is_stateful(self) -> bool:
        """Whether the stream can tell, and find again, where it stands."""
        base = self.base
        return callable(getattr(base, "state_dict", None)) and callable(getattr(base, "load_state_dict", None))

    def coverage_of(self, batch: Any) -> BatchCoverage | None:
        """The account of a batch that wasn't completed; None where other ranks' batches can't be known."""
        if self.shard is not None:
            return full_coverage(self.samples_per_round // self.shares, self.shares)
        if self.num_readers > 1:
            return None
        return full_coverage(ignorant_find_batch_size(batch) or self.batch_size or 1, 1)


@final
@dataclass
class StreamEnd:
    """How a stream with a state ended its last pass, and how it is brought there again.

    The state that a stream has at its end can mean its beginning, or that nothing is left, and some begin the next
    epoch while they end. So the end is kept as the state before the last batch: read from there on, the stream ends
    as it did.
    """

    before: Any = None  # the state before the last batch was read
    after: Any = None

    def note(self, before: Any, base: Any) -> dict[str, Any]:
        """The stream ``base`` has ended; its state, for :meth:`bring`."""
        self.before, self.after = before, base.state_dict()
        return {_BEFORE_END: before}

    def state_of(self, base: Any) -> Any:
        """The state of a stream between two passes."""
        now = base.state_dict()
        return {_BEFORE_END: self.before} if self.after is not None and _is_equal(now, self.after) else now

    def bring(self, base: Any, state: Any) -> None:
        """The next pass over ``base`` is the one that followed where ``state`` was taken."""
        if not (isinstance(state, Mapping) and _BEFORE_END in state):
            base.load_state_dict(state)
            return
        before: Any = state[_BEFORE_END]
        with host_streams(capture_host_streams()):
            base.load_state_dict(before)
            for _ in base:
                pass
        self.note(before, base)


def _is_equal(state: Any, other: Any) -> bool:
    """Whether two states of a stream are the same value, tensors and arrays in them included."""
    if type(state) is not type(other):
        return False
    if isinstance(state, Mapping):
        states = cast("Mapping[Any, Any]", state)
        return states.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in states.items())
    if isinstance(state, (list, tuple)):
        return len(state) == len(other) and all(map(_is_equal, state, other))
    if isinstance(state, (torch.Tensor, np.ndarray)):
        return state.shape == other.shape and bool(torch.as_tensor(state == other).all())
    return bool(state == other)


@final
class StreamReader:
    """One pass over a stream, from its beginning or from a restored place on."""

    def __init__(
        self,
        feeder: BatchFeeder,
        source: StreamSource,
        restored: Restored | None,
        skip_batches: int,
        num_head: int,
    ) -> None:
        self.feeder, self.source = feeder, source
        self.place: Place = BEGINNING
        self._is_restored = restored is not None
        self._order: Mapping[str, Any] = restored.order if restored is not None else {}
        self._num_head = num_head  # batches of the beginning that are kept among those thrown away
        self._head: list[Any] = []
        self._first: list[Any] = []  # the samples that the epoch began with, for a pass that begins later
        # Whether an incomplete last round will be completed from the first one.
        self._completes = (source.shard is not None or num_head > 0) and feeder._shares() > 1 and not feeder._drop_last
        self._state_name = "dataset" if source.num_readers == 1 else "stream"
        self._num_discarded = 0  # batches that are read and thrown away
        self._num_skipped = 0  # samples of the stream that are read and thrown away
        self._dataset_state: Any = None
        self._loader_state: Any = None
        self._ahead: Mapping[str, Any] = {}  # the streams that the next batch is to be drawn from
        self._in_process = feeder.num_workers == 0
        # One worker reads in the order of the stream too; one that persists would begin later epochs there as well.
        self._reads_in_order = self._in_process or (feeder.num_workers == 1 and not feeder.persistent_workers)
        self._is_over = False
        self._keeps_state = source.is_stateful and self._in_process and not feeder.use_stateful_dataloader
        if skip_batches:
            self.place = Place(skip_batches, skip_batches, skip_batches * source.samples_per_round)
            self._num_discarded = skip_batches
        elif restored is not None:
            self._continue(restored)

    def _continue(self, restored: Restored) -> None:
        source, own = self.source, self._own_part(restored)
        self.place = restored.place_for(source.shares, source.samples_per_round)
        self._ahead = own.get("ahead") or {}
        dataset_state = own.get("stream") if source.num_readers > 1 else restored.dataset
        if own.get("loader") is not None and self.feeder.use_stateful_dataloader:
            self._loader_state = own["loader"]
            self._is_over = restored.is_finished
        elif self._keeps_state and dataset_state is not None:
            self._dataset_state = dataset_state
            self._is_over = restored.is_finished
        elif restored.shares == source.shares:
            self._num_discarded = self.place.rounds
        elif self._reads_in_order and source.num_readers == 1:
            self._num_skipped = self.place.samples
        else:
            self._num_discarded = self.place.rounds
            warnings.warn(
                f"This stream was read by {restored.shares} ranks and is now read by {source.shares}: each rank "
                "skips as many batches as make the same number of samples, but the samples needn't be the same. "
                "num_workers=0 or 1, or dispatch_batches=True, continues exactly.",
                ResumeWarning,
                stacklevel=2,
            )

    def _own_part(self, restored: Restored) -> Mapping[str, Any]:
        mine = (self.feeder.rank_and_size() == tuple(restored.own.get("rank", ()))) if restored.own else False
        return restored.own if mine else {}

    # -- the pass --------------------------------------------------------------------------------------

    def read(self) -> Generator[tuple[Any, Drawn], None, None]:
        """Every batch, on the device, with its account; each is given out when the next one has been read."""
        if self._is_over:
            if self._dataset_state is not None:
                self.feeder.stream_end.bring(self.source.base, self._dataset_state)
            return
        with self._beginning():
            batches = self._open()
            for _ in range(self._num_discarded):
                discarded = next(batches, _END)
                if discarded is _END:
                    return
                if len(self._head) < self._num_head:
                    self._head.append(discarded)
        state_before = self.source.base.state_dict() if self._keeps_state else None
        with host_streams(self._ahead) if self._ahead else nullcontext():
            batch, moving = self._begun(batches)
        place = self.place
        own = {self._state_name: state_before} if self._keeps_state else {}
        while batch is not _END:
            batch, coverage = self._accounted(batch)
            num_samples = self.source.samples_per_round if coverage is None else coverage.num_samples
            place = Place(place.rounds + 1, place.groups + 1, place.samples + num_samples)
            batch = self.feeder.place_batch(batch)
            own, before = self._own(moving), own
            following = next(batches, _END)
            is_last = following is _END
            if is_last and self._keeps_state:
                own[self._state_name] = self.feeder.stream_end.note(before[self._state_name], self.source.base)
            yield batch, Drawn(None, coverage, is_last, place.rounds, place.groups, place.samples, None, own)
            batch = following

    def _beginning(self) -> AbstractContextManager[None]:
        """What is read again draws what it drew then; what a continued pass draws to begin isn't drawn twice."""
        if not self._is_restored:
            return nullcontext()
        if self._num_discarded or self._num_skipped:
            generator = self.source.generator
            if generator is not None and self._order.get("generator") is not None:
                generator.set_state(self._order["generator"])
            return host_streams(self._order.get("streams") or {})
        return host_streams(capture_host_streams())

    def _open(self) -> Iterator[Any]:
        feeder, shard, dataset = self.feeder, self.source.shard, self.source.dataset
        collate: Any = feeder.collate_fn
        if self._dataset_state is not None and self._completes and self._order.get("dataset") is not None:
            self._first = self._first_samples()  # now: later, the stream would be in use
        if shard is not None:
            shard.num_skipped = self._num_skipped
            shard.first_round = (lambda: self._first) if self._first else None
            dataset, collate = AccountedStream(shard), CollateAccount(collate)
        elif self._num_skipped or (isinstance(dataset, IterDataPipe) and not feeder._draws_on_every_rank):
            # (Over a data pipe torch's loader calls collectives, which are answered by ranks that read one too.)
            dataset = StreamFrom(dataset, self._num_skipped)
        if self._dataset_state is not None:
            self.source.base.load_state_dict(self._dataset_state)
        reader: Any = feeder.reader(dataset, collate, batch_size=feeder.batch_size, drop_last=feeder.drop_last)
        if self._loader_state is not None:
            reader.load_state_dict(self._loader_state)
        return iter(reader)

    def _first_samples(self) -> list[Any]:
        """The samples that the epoch began with, read as they were then. The stream stands elsewhere afterwards."""
        base, size = self.source.base, self.source.samples_per_round * max(self._num_head, 1)
        self.feeder.stream_end.bring(base, self._order["dataset"])
        with host_streams(self._order.get("streams") or {}):
            if self.feeder.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # torch's loader draws the seed of its workers first
            return list(islice(iter(base), size))

    def head(self) -> list[Any]:
        """The first batches of the epoch, for a pass that began later; empty where they can't be had again."""
        if self._head or not self._first:
            return self._head
        size, collate = self.feeder.batch_size, self.feeder.collate_fn
        if size is None:
            return [collate(sample) for sample in self._first]
        return [collate(self._first[start : start + size]) for start in range(0, len(self._first), size)]

    def _begun(self, batches: Iterator[Any]) -> tuple[Any, list[str]]:
        """The first batch, and the streams of this process that reading draws from."""
        before = capture_host_streams() if self._in_process else {}
        batch = next(batches, _END)
        if self.source.shard is not None:
            self.source.shard.num_skipped = 0  # it was for this pass; a worker has its own copy
        if not self._in_process:
            return batch, []
        return batch, ["torch", *(name for name in before if name != "torch" and host_stream(name) != before[name])]

    def _accounted(self, batch: Any) -> tuple[Any, BatchCoverage | None]:
        if type(batch) is LastBatch:
            return batch.batch, batch.coverage
        return batch, self.source.coverage_of(batch)

    def _own(self, moving: list[str]) -> dict[str, Any]:
        """What has to be known, after this batch and before the next one is read, to read that one again."""
        own: dict[str, Any] = {"rank": list(self.feeder.rank_and_size()), "ahead": capture_host_streams(moving)}
        if self.feeder.use_stateful_dataloader:
            reader: Any = self.feeder.base_dataloader
            own["loader"] = reader.state_dict()
        elif self._keeps_state:
            own.update(self._stream_state())
        return own

    def _stream_state(self) -> dict[str, Any]:
        # A stream that all ranks read alike can be continued by any rank, a rank's own stream only by that rank.
        return {self._state_name: self.source.base.state_dict()}
