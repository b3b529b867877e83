"""Read an iterable dataset one batch ahead, to detect the last batch, and from any position."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from ..distributed.random import capture_host_streams, host_stream, host_streams
from ..distributed.world import current_world
from ..errors import PreparationError, ResumeWarning
from ..nested import ignorant_find_batch_size
from .reader import ReadPlan
from .resume import SavedPosition
from .sampling import BEGINNING, BatchCoverage, BatchInfo, ResumePosition, full_coverage, has_state, samplers_of
from .sharding import (
    CollateWithCoverage,
    CoverageFunction,
    IterableDatasetShard,
    LastBatch,
    ShardedStream,
    StatefulShardedStream,
    StreamFrom,
)

if TYPE_CHECKING:
    from .loader import PreparedLoader

_METHODS: Final = ("__iter__", "_get_iterator")


def reads_by_itself(dataloader: object) -> bool:
    """Return whether the class of ``dataloader`` has its own ``__iter__`` or iterator."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    known = [DataLoader] if torchdata is None else [DataLoader, torchdata.StatefulDataLoader]
    kind = type(dataloader)
    return not any(all(getattr(kind, name, None) is getattr(one, name, None) for name in _METHODS) for one in known)


def loader_like(own: DataLoader[object], dataset: object, settings: Mapping[str, object]) -> DataLoader[object]:
    """Copy the user's loader, to read ``dataset`` with the given samplers and settings."""
    reader = copy.copy(own)
    changed = {name: value for name, value in settings.items() if name != "multiprocessing_context"}
    # Torch fixes these attributes at construction; a copy is constructed without it.
    vars(reader).update(changed, dataset=dataset, _iterator=None)
    if "batch_size" in settings and settings["batch_size"] is None:
        vars(reader).update(batch_sampler=None)
    return reader


def wrong_batches_error(own: object, problem: str) -> PreparationError:
    """Return the error for a loader that yields other batches than its batch sampler requests."""
    name = type(own).__qualname__
    return PreparationError(
        f"{name}.__iter__ {problem}, so the samples of its batches are unknown. A loader class may have its own "
        "__iter__ if it yields one batch for each of self.batch_sampler, in this order (as "
        "`for batch in super().__iter__()` does). Otherwise, move its work into the dataset, collate_fn or the batch "
        f"sampler, or don't prepare this {name}."
    )


def check_own_iter(own: object, *, is_sharded_stream: bool, use_stateful_dataloader: bool) -> None:
    """Raise if the loader's own ``__iter__`` can't be used.

    Raises:
        PreparationError: the text has the reason.
    """
    name = type(own).__qualname__
    if is_sharded_stream:
        raise PreparationError(
            f"{name} has an __iter__ of its own, so its iterable dataset can't be sharded over the ranks: sharding "
            "happens when batches are collated. Use dispatch_batches=True (rank 0 reads), or already_sharded=True if "
            "each rank's dataset is its own part."
        )
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    if use_stateful_dataloader and not (torchdata and isinstance(own, torchdata.StatefulDataLoader)):
        raise PreparationError(
            f"use_stateful_dataloader=True reads through torchdata's StatefulDataLoader, but {name} has an __iter__ of "
            f"its own. Derive {name} from StatefulDataLoader, or leave use_stateful_dataloader out (the position is "
            "saved without it)."
        )


# --------------------------------------------------------------------------------------------------
# Reading an iterable dataset

_END: Final = object()
_BEFORE_END: Final = "before_end"


@final
@dataclass(frozen=True)
class StreamSource:
    """An iterable dataset, and how it is sharded over ranks."""

    dataset: Any  # an IterableDatasetShard, or the dataset that each rank reads itself
    batch_size: int | None
    num_readers: int  # ranks that each read their own data; 1 if the data isn't sharded, or is sharded here

    @property
    def shard(self) -> IterableDatasetShard | None:
        """The dataset that shards common data over all ranks, if there is one."""
        return self.dataset if isinstance(self.dataset, IterableDatasetShard) else None

    @property
    def base(self) -> Any:
        """The user's own dataset."""
        return self.dataset if self.shard is None else self.shard.dataset

    @property
    def dp_size(self) -> int:
        """The number of ranks over which the samples are sharded."""
        return self.num_readers if self.shard is None else self.shard.num_processes

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all ranks use in one step."""
        return (self.batch_size or 1) * self.num_readers if self.shard is None else self.shard.global_batch_size

    @property
    def generator(self) -> torch.Generator | None:
        """The dataset's own generator, if it has one."""
        generator = getattr(self.base, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def is_stateful(self) -> bool:
        """Whether the dataset can save and load its position."""
        return has_state(self.base)

    def coverage_of(self, batch: object) -> BatchCoverage | None:
        """Return the coverage of a batch without padding; None if other ranks' batches are unknown."""
        if self.shard is not None:
            return full_coverage(self.global_batch_size // self.dp_size, self.dp_size)
        if self.num_readers > 1:
            return None
        return full_coverage(ignorant_find_batch_size(batch) or self.batch_size or 1, 1)


class StatefulStream(Protocol):
    """An iterable dataset that can save and load its position."""

    def __iter__(self) -> Iterator[object]: ...

    def state_dict(self) -> object: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@final
@dataclass
class StreamEnd:
    """The state of a stateful iterable dataset at the end of its last pass, and how to restore it.

    At its end, a dataset's state can mean its beginning, or that nothing is left, and some datasets begin the next
    epoch while they end. So the end is saved as the state before the last batch: reading from there ends the dataset in
    the same way.
    """

    before: Any = None  # the state before the last batch was read
    after: Any = None

    def note(self, before: object, base: StatefulStream) -> dict[str, object]:
        """Record that ``base`` has ended; return its state, for :meth:`restore`."""
        self.before, self.after = before, base.state_dict()
        return {_BEFORE_END: before}

    def state_of(self, base: StatefulStream) -> object:
        """Return the state of ``base`` between two passes."""
        now = base.state_dict()
        return {_BEFORE_END: self.before} if self.after is not None and _is_equal(now, self.after) else now

    def restore(self, base: StatefulStream, state: object) -> None:
        """Restore ``base`` to ``state``; its next pass is the one after that state."""
        if not (isinstance(state, Mapping) and _BEFORE_END in state):
            base.load_state_dict(state)
            return
        before: Any = state[_BEFORE_END]
        with host_streams(capture_host_streams()):
            base.load_state_dict(before)
            for _ in base:
                pass
        self.note(before, base)


def _is_equal(state: object, other: Any) -> bool:
    """Return whether two states of a dataset are equal, including tensors and arrays in them."""
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


def holds_stream(state: Mapping[str, Any], loader: PreparedLoader, epoch: int, *, keeps_first: bool) -> bool:
    """Return whether torchdata's loader can resume from ``state`` in ``epoch`` without reading data again.

    It can if ``state`` has the dataset's state of every worker. Else it would read the data up to the position, and
    count those batches twice; a worker whose data has ended would start again. After the first epoch, a persistent
    worker that hasn't yielded a batch can answer with the end of the epoch before, and new workers can't
    read the first batches of the epoch again, which pad its last one.
    """
    snapshot, num_workers = state.get("_snapshot"), loader.num_workers
    if (snapshot is not None) != (num_workers > 0):
        return False
    parts = [state] if snapshot is None else list(snapshot["_worker_snapshots"].values())
    fetchers = [part.get("fetcher_state") or {} for part in parts]
    is_later = loader.persistent_workers and epoch > 0
    has_unread = is_later and (keeps_first or (snapshot or state)["_snapshot_step"] < num_workers)
    return (
        len(parts) == max(num_workers, 1)
        and not (has_unread or any(fetcher.get("fetcher_ended") for fetcher in fetchers))
        and all(
            part.get("dataset_state") is not None or fetcher.get("dataset_iter_state") is not None
            for part, fetcher in zip(parts, fetchers, strict=True)
        )
    )


def warn_of_new_workers(loader: PreparedLoader, base: object, num_passes: int) -> None:
    """Warn if a resumed ``loader`` has persistent workers, which can't know how often others had read ``base``."""
    if num_passes and loader.persistent_workers and getattr(base, "set_epoch", None) is None:
        warnings.warn(
            f"This stream's persistent workers had read it {num_passes} time(s) when it was saved. New workers begin "
            "it anew: if its order changes from epoch to epoch, samples are read twice or not at all. It resumes "
            "exactly with persistent_workers=False, or with a set_epoch(epoch) of the dataset.",
            ResumeWarning,
            stacklevel=3,
        )


@final
class UnreadWorkers:
    """The workers of a resumed torchdata loader that have yielded no batch yet, and the states they resumed from.

    torchdata asks each worker for its state once it has loaded one. A dataset that applies a loaded state in its next
    pass still answers with an earlier state, so until a worker yields, its state is the one that it loaded.
    """

    def __init__(self, loaded: Mapping[str, Any], started: Mapping[str, Any]) -> None:
        before, after = loaded["_snapshot"], started["_snapshot"]
        self._step: int = after["_snapshot_step"]
        is_at_start = before["_snapshot_step"] == self._step
        self._loaded: dict[str, Any] = dict(before["_worker_snapshots"]) if is_at_start else {}
        self._answers: Mapping[str, Any] = after["_worker_snapshots"]

    def correct(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` of torchdata's loader with the loaded states of the workers that have yielded no batch."""
        snapshot = state["_snapshot"]
        workers = snapshot["_worker_snapshots"]
        if snapshot["_snapshot_step"] > self._step:
            self._loaded.pop(f"worker_{snapshot['_last_yielded_worker_id']}", None)
        for name in [name for name in self._loaded if not _is_equal(workers[name], self._answers[name])]:
            del self._loaded[name]
        if not self._loaded:
            return state
        return {**state, "_snapshot": {**snapshot, "_worker_snapshots": {**workers, **self._loaded}}}


@final
class StreamReader:
    """One pass over an iterable dataset, from its beginning or a resume position."""

    def __init__(self, loader: PreparedLoader, source: StreamSource, plan: ReadPlan) -> None:
        saved = plan.saved
        self.loader: PreparedLoader = loader
        self.plan = plan
        self.source = source
        self.position: ResumePosition = BEGINNING
        self._is_resumed = saved is not None
        self._order: Mapping[str, Any] = saved.order if saved is not None else {}
        self._first_batches: list[Any] = []  # those of the skipped ones that are kept
        self._first: list[Any] = []  # the first samples of the epoch, for a pass that begins later
        # Whether an incomplete last global batch will be padded from the first one.
        pads = source.shard is not None or plan.num_first_batches > 0
        self._completes = pads and plan.dp_size > 1 and not plan.drops_last
        self._state_name = "dataset" if source.num_readers == 1 else "stream"
        self._num_discarded = 0  # batches to read and discard
        self._num_skipped = 0  # samples of the dataset to read and discard
        self._later_part: StreamFrom | None = None  # the dataset without these samples, if it isn't sharded here
        self._dataset_state: Any = None
        self._loader_state: Any = None
        self._unread_workers: UnreadWorkers | None = None
        self._ahead: Mapping[str, Any] = {}  # the random streams from which to draw the next batch
        self._in_process = loader.num_workers == 0
        # A single worker reads in order too, but a persistent one would skip the samples in later epochs as well.
        self._reads_in_order = self._in_process or (loader.num_workers == 1 and not loader.persistent_workers)
        self._is_over = False
        self._keeps_state = source.is_stateful and self._in_process
        if plan.num_skipped:
            num_skipped = self._num_discarded = plan.num_skipped
            self.position = ResumePosition(num_skipped, num_skipped, num_skipped * source.global_batch_size)
        elif saved is not None:
            self._continue(saved)
            if self._loader_state is None or saved.is_finished:
                warn_of_new_workers(loader, source.base, saved.epoch + saved.is_finished)

    def _continue(self, saved: SavedPosition) -> None:
        is_mine = bool(saved.own) and self.loader.rank_and_size() == tuple(saved.own.get("rank", ()))
        source, own = self.source, saved.own if is_mine else {}
        self.position = saved.position_for(source.dp_size, source.global_batch_size)
        self._ahead = own.get("ahead") or {}
        dataset_state = own.get("stream") if source.num_readers > 1 else saved.dataset
        if self._keeps_state and dataset_state is not None:
            self._dataset_state = dataset_state
            self._is_over = saved.is_finished
        elif self.loader.use_stateful_dataloader and holds_stream(
            own.get("loader") or {}, self.loader, saved.epoch, keeps_first=self.plan.num_first_batches > 0
        ):
            self._loader_state = own["loader"]
            self._is_over = saved.is_finished
        elif saved.dp_size == source.dp_size:
            self._num_discarded = self.position.steps
        elif self._reads_in_order and source.num_readers == 1:
            self._num_skipped = self.position.samples
        else:
            self._num_discarded = self.position.steps
            warnings.warn(
                f"This stream was read by {saved.dp_size} ranks and is now read by {source.dp_size}: each rank "
                "skips as many batches as make the same number of samples, but the samples needn't be the same. "
                "num_workers=0 or 1, or dispatch_batches=True, continues exactly.",
                ResumeWarning,
                stacklevel=2,
            )

    # -- the pass --------------------------------------------------------------------------------------

    def read(self) -> Generator[tuple[object, BatchInfo], None, None]:
        """Yield every batch, on the device, with its batch info, once the next batch has been read."""
        if self._is_over:
            if self._dataset_state is not None:
                self.loader.stream_end.restore(self.source.base, self._dataset_state)
            return
        with self._beginning():
            batches = self._open()
            for _ in range(self._num_discarded):
                discarded = next(batches, _END)
                if discarded is _END:
                    return
                if len(self._first_batches) < self.plan.num_first_batches:
                    self._first_batches.append(discarded)
        state_before = self.source.base.state_dict() if self._keeps_state else None
        with host_streams(self._ahead) if self._ahead else nullcontext():
            batch, moving = self._first_batch_read(batches)
        position = self.position
        own = {self._state_name: state_before} if self._keeps_state else {}
        while batch is not _END:
            batch, coverage = self._with_coverage(batch)
            num_samples = self.source.global_batch_size if coverage is None else coverage.num_samples
            position = ResumePosition(position.steps + 1, position.batches + 1, position.samples + num_samples)
            batch = self.plan.place(batch)
            own, before = self._own(moving, position.steps), own
            following = next(batches, _END)
            is_last = following is _END
            if is_last and self._keeps_state:
                own[self._state_name] = self.loader.stream_end.note(before[self._state_name], self.source.base)
            yield (
                batch,
                BatchInfo(None, coverage, is_last, position.steps, position.batches, position.samples, None, own),
            )
            batch = following

    def _beginning(self) -> AbstractContextManager[None]:
        """Enter a context for the start of a resumed pass.

        To read data again, it has the random streams of the saved pass; else it leaves the streams unchanged.
        """
        if not self._is_resumed:
            return nullcontext()
        if self._num_discarded or self._num_skipped:
            generator = self.source.generator
            if generator is not None and self._order.get("generator") is not None:
                generator.set_state(self._order["generator"])
            return host_streams(self._order.get("streams") or {})
        return host_streams(capture_host_streams())

    def _open(self) -> Iterator[object]:
        loader, shard, dataset = self.loader, self.source.shard, self.source.dataset
        collate: Any = loader.collate_fn
        if self._dataset_state is not None and self._completes and self._order.get("dataset") is not None:
            self._first = self._first_samples()  # now, because later the dataset is in use
        if shard is not None:
            shard.num_skipped = self._num_skipped
            shard.first_global_batch = (lambda: self._first) if self._first else None
            stream = StatefulShardedStream if self.source.is_stateful else ShardedStream
            dataset, collate = stream(shard), CollateWithCoverage(collate)
        elif self._num_skipped or (isinstance(dataset, IterDataPipe) and self.plan.is_only_reader):
            # (For a data pipe, torch's loader calls collectives, which only ranks that read one too take part in.)
            dataset = self._later_part = StreamFrom(dataset, self._num_skipped)
        if self._dataset_state is not None:
            self.source.base.load_state_dict(self._dataset_state)
        reader: Any = loader.torch_loader(dataset, collate, batch_size=loader.batch_size, drop_last=loader.drop_last)
        if self._loader_state is not None:
            reader.load_state_dict(self._loader_state)
        batches = iter(reader)
        if self._loader_state is not None and not self._in_process:
            self._unread_workers = UnreadWorkers(self._loader_state, reader.state_dict())
        return batches

    def _first_samples(self) -> list[object]:
        """Read the epoch's first samples again, with the same random streams. This moves the dataset's position."""
        base, size = self.source.base, self.source.global_batch_size * max(self.plan.num_first_batches, 1)
        self.loader.stream_end.restore(base, self._order["dataset"])
        with host_streams(self._order.get("streams") or {}):
            if self.loader.generator is None:
                torch.empty((), dtype=torch.int64).random_()  # torch's loader first draws its workers' seed
            return list(islice(iter(base), size))

    def first_batches(self, num_batches: int, num_rows: int) -> list[object]:
        """Return the first batches of the epoch, if this pass began later, all that were kept or can be read again."""
        return [self.plan.place(batch) for batch in self._first_unplaced()]

    def _first_unplaced(self) -> list[object]:
        if self._loader_state is not None and not self._keeps_state and not self._first_batches:
            self._first_batches = self._first_batches_again()
        if self._first_batches or not self._first:
            return self._first_batches
        size, collate = self.loader.batch_size, self.loader.collate_fn
        if size is None:
            return [collate(sample) for sample in self._first]
        return [collate(self._first[start : start + size]) for start in range(0, len(self._first), size)]

    def _first_batches_again(self) -> list[object]:
        """Read the first batches of the epoch with a separate reader, whose workers read as in the saved pass."""
        loader = self.loader.copy_with()
        reader = loader.torch_loader(
            self.source.dataset, loader.collate_fn, batch_size=loader.batch_size, drop_last=loader.drop_last
        )
        with host_streams(self._order.get("streams") or {}):
            return list(islice(iter(reader), self.plan.num_first_batches))

    def _first_batch_read(self, batches: Iterator[object]) -> tuple[object, list[str]]:
        """Return the first batch, and the names of this process's random streams that reading draws from."""
        before = capture_host_streams() if self._in_process else {}
        batch = next(batches, _END)
        # Samples are skipped in this pass only; a worker has its own copy, and the next pass may reuse the reader.
        if self.source.shard is not None:
            self.source.shard.num_skipped = 0
        if self._later_part is not None:
            self._later_part.num_samples = 0
        if not self._in_process:
            return batch, []
        return batch, ["torch", *(name for name in before if name != "torch" and host_stream(name) != before[name])]

    def _with_coverage(self, batch: object) -> tuple[object, BatchCoverage | None]:
        if type(batch) is LastBatch:
            return batch.batch, batch.coverage
        return batch, self.source.coverage_of(batch)

    def _own(self, moving: list[str], num_batches: int) -> dict[str, object]:
        """Return this rank's state before the next batch, to read that batch again."""
        own: dict[str, Any] = {"rank": list(self.loader.rank_and_size()), "ahead": capture_host_streams(moving)}
        if self.loader.use_stateful_dataloader:
            reader: Any = self.loader.base_dataloader
            state = reader.state_dict()
            own["loader"] = state if self._unread_workers is None else self._unread_workers.correct(state)
            if self._in_process:  # the reader itself counts from the position at which its pass resumed
                own["loader"].update(_num_yielded=num_batches, _sampler_iter_yielded=num_batches)
        if self._keeps_state:
            # Any rank can resume a dataset that all ranks read; only the same rank can resume its own data.
            own[self._state_name] = self.source.base.state_dict()
        return own


# --------------------------------------------------------------------------------------------------
# Loaders that shard their data themselves: detected, so that no data is sharded twice

_RANKS = ("rank", "process_index", "dp_rank")
_COUNTS = ("num_replicas", "world_size", "num_processes", "dp_world_size")
_INNER = ("dataset", "_datapipe", "source_datapipe", "datapipe")  # attributes of wrapping datasets for the inner one
_DEEPEST = 8

_warned: set[str] = set()


class AlreadyShardedWarning(UserWarning):
    """A loader shards its data over the ranks itself, and is used unchanged."""


class UndividedStreamWarning(UserWarning):
    """An iterable dataset was sharded over the ranks, and may already have been sharded."""


def _names_a_rank_of(thing: object, count: int) -> bool:
    ranks = [getattr(thing, name, None) for name in _RANKS]
    counts = [getattr(thing, name, None) for name in _COUNTS]
    return any(type(one) is int and 0 <= one < count for one in ranks) and any(
        type(one) is int and one == count for one in counts
    )


def rank_aware_part(dataloader: DataLoader[object], count: int) -> object:
    """Return the sampler or dataset that already shards the data of ``dataloader`` over ``count`` ranks, or None."""
    if count == 1:
        return None
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        parts = _streams_in(dataset)
    else:
        parts = samplers_of(dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler)
    return next((part for part in parts if _names_a_rank_of(part, count) or _is_divided_by_torch(part)), None)


def _streams_in(dataset: object) -> list[object]:
    """Return ``dataset``, the datasets inside it, and their records of rank and world size."""
    found: list[Any] = []
    while dataset is not None and len(found) < _DEEPEST:
        found.append(dataset)
        # Hugging Face datasets that were split by node keep rank and world_size in a separate record.
        record = getattr(dataset, "_distributed", None)
        if record is not None:
            found.append(record)
        members = getattr(dataset, "__dict__", {})
        dataset = next((members[name] for name in _INNER if members.get(name) is not None), None)
    return found


def _is_divided_by_torch(part: object) -> bool:
    """Return whether torch's loader itself shards it over the ranks, as it does data pipes with a sharding filter."""
    return isinstance(part, IterDataPipe) and callable(getattr(part, "apply_sharding", None))


def warn_if_sharded_here(dataloader: DataLoader[object], count: int) -> None:
    """Warn once, on rank 0, that an iterable dataset is assumed to be the same on all ranks."""
    world = current_world()
    dataset: Any = dataloader.dataset
    name = type(dataset).__qualname__
    if (
        count == 1
        or not isinstance(dataset, IterableDataset)
        or name in _warned
        or not (world is None or world.is_main)
    ):
        return
    _warned.add(name)
    warnings.warn(
        f"The stream {name!r} is taken to give the same samples on all {count} ranks, and each rank gets its part of "
        "them. If each rank's stream is its own part already, say DataLoaderConfiguration(already_sharded=True), else "
        "samples are lost; already_sharded=False confirms the division and silences this.",
        UndividedStreamWarning,
        stacklevel=4,
    )


def coverage_function(part: object, count: int) -> CoverageFunction:
    """Return the coverage function for batches of ``part``; torch's sampler appends repeated samples at the end."""
    if type(part) is not DistributedSampler or part.drop_last:
        return lambda num_drawn, size: None

    def coverage_of(num_drawn: int, size: int) -> BatchCoverage | None:
        num_samples = len(part.dataset)  # pyright: ignore[reportArgumentType]
        if (num_drawn + size) * count <= num_samples:
            return full_coverage(size, count)
        # The j-th sample of rank r is number r + j * count of the order; samples after the dataset's end are repeated.
        valid = tuple(min(max(-(-(num_samples - rank) // count) - num_drawn, 0), size) for rank in range(count))
        return BatchCoverage(valid, (size,) * count)

    return coverage_of
