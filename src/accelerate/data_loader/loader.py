"""A prepared loader: its loop, its epoch and its position."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..devices.memory import copy_stream
from ..distributed.random import broadcast_value, capture_host_streams, synchronize_rng_states
from ..distributed.world import World, current_world
from ..errors import ResumeWarning
from ..training.accumulation import GradientState
from .adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    SequenceShardLoader,
    generator_in,
    is_torchdatas,
    num_batches_in,
    position_in,
    torchdatas_form,
    torchdatas_part,
    with_position,
)
from .iterable import StreamEnd, StreamReader, StreamSource, warn_of_new_workers
from .map_style import IndexReader, RecordingSampler
from .random_streams import SampleSeed
from .reader import Delivery, DevicePrefetch, Reader, ReadPlan, prefetched
from .resume import PositionState, Progress, SavedPosition, epoch_listeners, epoch_of_script, note_epochs
from .sampling import (
    BEGINNING,
    UNKNOWN,
    BatchInfo,
    Order,
    OrderState,
    PositionedBatchSampler,
    ResumePosition,
    SkipBatchSampler,
    samplers_of,
    unskipped,
)
from .sharding import BatchSamplerShard, CoverageFunction, IterableDatasetShard, hidden_generators

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OURS = (BatchSamplerShard, SkipBatchSampler)


class PreparedLoader(DataLoaderStateMixin, DataLoaderAdapter, ABC):
    """A prepared loader: a torch DataLoader that yields batches on the device and knows their valid rows.

    For the current batch, ``end_of_dataloader`` tells whether it is the last one, and ``coverage`` which rows are
    valid, on every rank.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        device: torch.device | None = None,
        rng_types: Sequence[object] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        *,
        gradient_state: GradientState | None = None,
        prefetch_to_device: int = 0,
        sample_seed: SampleSeed | None = None,
        reseed_workers: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.gradient_state = gradient_state
        self.torch_device_mesh = torch_device_mesh
        self.prefetch_to_device = prefetch_to_device
        self.sample_seed = sample_seed  # if every sample is read with its own random streams
        self.reseed_workers = reseed_workers
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._is_accelerate_prepared = True
        self.progress: Progress = Progress(epoch=iteration)
        self.presharded_size = 1  # how many ranks read their own shard, if the data isn't sharded here
        self.presharded_rank = 0  # which of these shards this rank reads
        self.coverage_of: CoverageFunction | None = None  # the coverage of batches of a rank-aware sampler
        self._recorder = RecordingSampler()
        self._loaded_state: dict[str, Any] = {}  # the last loaded state of torchdata's loader
        self._announced_epoch: int | None = None
        self._newest_pass: object = None
        self.stream_end: StreamEnd = StreamEnd()
        self.device_prefetch: DevicePrefetch | None = None  # the strategy's own way of copying batches to the device
        #: Copies the batches of the running pass; None: they are copied when they are read.
        self._active_prefetch: DevicePrefetch | None = None
        self.data_wait_seconds: float = 0.0  # time waited for batches in the running or last pass
        self.pass_began: float | None = None  # time of perf_counter
        note_epochs(self._epoch_listeners(), only_new=True)

    _prefetches_batches = True
    _skip_batches = 0

    @property
    def skip_batches(self) -> int:
        """The number of batches skipped at the beginning of every pass."""
        return self._skip_batches

    @skip_batches.setter
    def skip_batches(self, value: int) -> None:
        if not isinstance(self.dataset, IterableDataset):  # batches skipped by skip_first_batches stay skipped
            root, num_skipped = unskipped(self.index_sampler)
            num_skipped += value - self._skip_batches
            skip = SkipBatchSampler(root, num_skipped) if num_skipped else root
            self.show(**{"sampler" if self.batch_sampler is None else "batch_sampler": skip})
        self._skip_batches = value

    # -- the loop --------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        progress, gradient_state = self.progress, self.gradient_state
        hooks, running = gradient_state.hooks, gradient_state.loaders
        for hook in hooks.begin_pass:
            hook(self)
        self._follow_epoch()
        saved = self._begin_pass()
        device_prefetch = self._active_prefetch = self._prefetch_of_pass()
        batches = self._read(saved)
        if device_prefetch is not None:
            batches = prefetched(batches, device_prefetch, self.prefetch_to_device if self.num_workers else 0)
        shown = vars(self)  # bypasses torch's check of attribute assignments, which is slow
        this_pass = shown["_newest_pass"] = object()
        self.begin()
        shown["data_wait_seconds"] = 0.0
        asked = pass_began = shown["pass_began"] = perf_counter()
        epoch, pass_start = progress.epoch, None
        try:
            for batch, batch_info in batches:
                shown["data_wait_seconds"] += perf_counter() - asked
                shown["end_of_dataloader"] = batch_info.is_last
                shown["coverage"] = batch_info.coverage
                shown["current_batch"] = batch
                if pass_start is None:  # known once the first batch is drawn
                    pass_start = progress.pass_start()
                elif shown["_newest_pass"] is not this_pass:
                    progress.return_to(pass_start)
                shown["_newest_pass"] = this_pass
                progress.batch_info = batch_info
                if running.active is not self:  # another loop has run in between
                    running.add(self, is_interleaved=True)
                for hook in hooks.begin_batch:
                    hook(self)
                yield batch
                if hooks.between_batches and not batch_info.is_last:
                    for hook in hooks.between_batches:
                        hook(self)
                asked = perf_counter()
            progress.finish(epoch)
        finally:
            batches.close()
            if self._newest_pass is this_pass:  # else another pass over this loader is running
                note_epochs(self._epoch_listeners())  # a sampler may count epochs itself
                self.end()
                for hook in hooks.end_pass:
                    hook(self)
                if running.active is not None and not self.is_interleaved:
                    running.nested_seconds += perf_counter() - pass_began

    def _prefetch_of_pass(self) -> DevicePrefetch | None:
        if not self._prefetches_batches or self.device is None:
            return None
        return self.device_prefetch or (copy_stream(self.device) if self.prefetch_to_device else None)

    def _begin_pass(self) -> SavedPosition | None:
        """Begin a pass; return the position to resume from, if there is one.

        A position after the last batch of an epoch means the beginning of the next epoch.
        """
        saved = self.progress.start()
        self._announce_epoch()
        if saved is None or not saved.is_finished:
            return saved
        # The order of the next epoch depends on the draws of the finished one, which the saved run had made. Persistent
        # workers were started in the saved run's first pass, so they are started in this one.
        reads = isinstance(self.dataset, IterableDataset) or self.persistent_workers
        for _ in self._read(saved) if reads else IndexReader(self, self.plan(saved)).draw():
            pass
        self.progress.finish(self.progress.epoch)
        return self._begin_pass()

    def _read(self, saved: SavedPosition | None) -> Generator[Delivery, None, None]:
        """Yield every batch of the pass, on the device, with its batch info."""
        self._synchronize()
        return self.open_reader(saved).read()

    def open_reader(self, saved: SavedPosition | None) -> Reader:
        """Return the reader of the next pass."""
        plan = self.plan(saved)
        return self._stream_reader(plan) if isinstance(self.dataset, IterableDataset) else IndexReader(self, plan)

    def plan(self, saved: SavedPosition | None) -> ReadPlan:
        """Return the plan of a pass from ``saved`` on."""
        is_stream = isinstance(self.dataset, IterableDataset)
        return ReadPlan(
            saved,
            self.skip_batches if is_stream else unskipped(self.index_sampler)[1],
            self.dp_size(),
            drops_last=self.drops_last,
            device=self.device if self._active_prefetch is None else None,
            non_blocking=self._non_blocking,
        )

    @property
    def drops_last(self) -> bool:
        """Whether an incomplete last global batch is left out."""
        return self._drop_last

    def _synchronize(self) -> None:
        world = self._world()
        others = [name for name in self.stream_names if name != "generator"]
        if world is not None and others:
            synchronize_rng_states(others, world=world)

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of processes."""
        world = self._world()
        return (0, 1) if world is None else (world.rank, world.size)

    @staticmethod
    def _world() -> World | None:
        world = current_world()
        return world if world is not None and world.is_distributed else None

    # -- map-style datasets ----------------------------------------------------------------------------

    def recorder(self) -> RecordingSampler:
        """Return a recorder for a pass; torch's loader, if it is kept, keeps its recorder.

        Loops over one loader may be nested, so otherwise each pass has its own.
        """
        return self._recorder if self._keeps_torch_loader else RecordingSampler()

    @property
    def index_sampler(self) -> Iterable[object]:
        """The batch sampler, or the sampler of a loader that doesn't batch."""
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

    def order(self) -> Order:
        """Return the object for the state that determines the order of an epoch."""
        return Order(self.index_sampler, self.synchronized_generator, _OURS, self.sample_seed)

    @property
    def stream_names(self) -> list[str]:
        """The random streams that all ranks copy from rank 0 when a pass begins."""
        return [str(getattr(kind, "value", kind)) for kind in self.rng_types or ()]

    def agreeing_world(self, order: Order) -> World | None:
        """Return the world whose ranks must draw the same order; None if they needn't agree."""
        if not order.needs_agreement or (self.rng_types is not None and "generator" not in self.stream_names):
            return None
        return self._world()

    def start_position(self, skipped: int, saved: SavedPosition | None) -> ResumePosition:
        """Return the start position of the pass; batches skipped by the user count from the epoch's beginning."""
        if skipped:
            position = self._position_after(skipped)
            return position if self.planned_batches is None else replace(position, samples=UNKNOWN)
        return BEGINNING if saved is None else saved.position_for(self.dp_size(), self.total_batch_size)

    # -- iterable datasets -----------------------------------------------------------------------------

    def _stream_source(self) -> StreamSource:
        return StreamSource(self.dataset, self.batch_size, self.presharded_size)

    def _stream_reader(self, plan: ReadPlan) -> StreamReader:
        source = self._stream_source()
        world = self._world()
        if source.shard is not None:
            source.shard.seed_generator()
        order_state: OrderState = {"streams": capture_host_streams()}
        if source.generator is not None:
            order_state["generator"] = source.generator.get_state()
            if world is not None and not plan.is_only_reader:
                order_state["generator"] = broadcast_value(order_state["generator"], world)
                source.generator.set_state(order_state["generator"])
        if source.num_readers == 1 and source.is_stateful and self.num_workers == 0:
            # For the samples that pad the last global batch.
            order_state["dataset"] = self.stream_end.state_of(source.base)
        self.progress.order_state = order_state if plan.saved is None else plan.saved.order
        reader = StreamReader(self, source, plan)
        self.progress.position = reader.position
        return reader

    # -- the epoch -------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The epoch of the running pass, or of the next one."""
        saved = self.progress.saved
        return self.progress.epoch + (saved is not None and saved.is_finished)

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.progress.epoch = value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also on the samplers or else the dataset."""
        self.progress.set_epoch(epoch)
        self._announced_epoch = None
        self._announce_epoch()

    def _announce_epoch(self) -> None:
        epoch, seedable = self.progress.epoch, self.order().seedable
        # A seeded sampler advances to its next epoch when its last index is drawn, before the pass ends.
        if epoch == self._announced_epoch and (seedable is None or seedable.epoch == epoch):
            return
        self._announced_epoch = epoch
        listeners = self._epoch_listeners()
        for listener in listeners:
            listener.set_epoch(epoch)
        note_epochs(listeners)

    def _follow_epoch(self) -> None:
        """Use the epoch that the script has set on its own sampler or dataset for the next pass.

        A loaded position has its own epoch.
        """
        epoch = None if self.progress.is_loaded else epoch_of_script(self._epoch_listeners())
        if epoch is not None:
            self.progress.set_epoch(epoch)

    def _epoch_listeners(self) -> list[Any]:
        return epoch_listeners(self.index_sampler, self.dataset)

    # -- the position ----------------------------------------------------------------------------------

    def dp_size(self) -> int:
        """Return the number of ranks that divide a global batch."""
        shard = self.shard
        return self.presharded_size if shard is None else shard.num_processes

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`position_state`; with torchdata, the state with the keys of torchdata's loader."""
        if not self.use_stateful_dataloader:
            return self.position_state()
        if self.progress.saved is not None:  # loaded, but not resumed yet
            return dict(self._loaded_state) if is_torchdatas(self._loaded_state) else self.position_state()
        state = self._torchdata_state()
        if not state:
            return state
        batch_info = self.progress.batch_info
        if batch_info is not None:
            state["_iterator_finished"] = batch_info.is_last
        return state if self._holds_order(state) else with_position(state, self._position())

    def _holds_order(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state of torchdata's loader is enough to resume in the order of its epoch."""
        if isinstance(self.dataset, IterableDataset):
            return self._stream_source().generator is None
        order = self.order()
        if order.generator is not None and generator_in(state) is not None:
            return True
        return not order.is_random and order.stateful is None

    def position_state(self) -> dict[str, Any]:
        """Return the epoch, the position after the current batch, and the state that determines this epoch's order.

        Checkpoints save this. With torchdata it includes the state of torchdata's loader, for other programs.
        """
        own = self._position()
        return {**self._torchdata_state(), **own} if self.use_stateful_dataloader else {**own}

    def _position(self) -> PositionState:
        is_stream = isinstance(self.dataset, IterableDataset)
        ready: OrderState = (
            {} if self.progress.is_inside else self._ready_stream() if is_stream else self.order().capture()
        )
        ready.pop("streams", None)  # between epochs, the next order is drawn from the process's streams
        ready.pop("plan", None)  # and batches are planned for the ranks of this run
        return self.progress.state(self.dp_size(), ready)

    def _torchdata_state(self) -> dict[str, object]:
        """Return the position in the format of torchdata's loader; empty before workers have started."""
        progress = self.progress
        if isinstance(self.dataset, IterableDataset):
            own = {} if progress.batch_info is None else (progress.batch_info.own or {})
            if progress.saved is not None:
                own = progress.saved.own
            return dict(own.get("loader") or torchdatas_form(self._base, self.num_workers))
        batch_info = progress.batch_info
        whole = self._own_sampler() if self.shard is None and self.presharded_size == 1 else None
        num_batches = 0 if batch_info is None else self._num_read(batch_info)
        return torchdatas_form(self._base, self.num_workers, batch_info, num_batches, whole, progress.order_state)

    def _num_read(self, batch_info: BatchInfo) -> int:
        """Return the number of batches that this rank's reader has yielded."""
        return batch_info.steps

    def _position_after(self, num_batches: int) -> ResumePosition:
        """Return the position after ``num_batches`` batches of this rank's reader."""
        shard = self.shard
        batches_per_step = shard.batches_per_step if isinstance(shard, BatchSamplerShard) else 1
        return ResumePosition(num_batches, num_batches * batches_per_step, num_batches * self.total_batch_size)

    def _from_torchdata(self, state: Mapping[str, Any]) -> PositionState:
        """Convert a position of torchdata's loader, as the original library saves it, to this loader's format."""
        own: dict[str, Any] = {}
        embedded = position_in(state)
        if embedded is not None:
            return embedded
        if isinstance(self.dataset, IterableDataset):
            own = {"rank": list(self.rank_and_size()), "loader": dict(state)}
        elif not self._holds_order(state) and self.order().seedable is None:
            warnings.warn(
                "load_state_dict: this position of torchdata's StatefulDataLoader doesn't hold the order of its epoch, "
                "so samples of the epoch may be seen twice or not at all. Positions of prepared loaders hold it.",
                ResumeWarning,
                stacklevel=4,
            )
        position, generator = self._position_after(num_batches_in(state)), generator_in(state)
        order: OrderState = {} if generator is None else {"generator": generator}
        is_finished = bool(state.get("_iterator_finished", False))
        return SavedPosition(
            self.progress.epoch, position, self.dp_size(), order, own=own, is_finished=is_finished
        ).state()

    def _ready_stream(self) -> OrderState:
        """Return the state that determines the iterable dataset's next pass, between two passes."""
        source = self._stream_source()
        ready: OrderState = {} if source.generator is None else {"generator": source.generator.get_state()}
        state = self.stream_end.state_of(source.base) if source.is_stateful and self.num_workers == 0 else None
        if state:
            ready.update(dataset=state, rank=list(self.rank_and_size()) if source.num_readers > 1 else None)
        return ready

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Resume from ``state_dict`` in the next pass, in the same order, without reading skipped samples.

        Iterable datasets without a state of their own are read, and discarded, up to that position.
        """
        if self.use_stateful_dataloader:
            if not state_dict:  # from a loader whose workers hadn't started
                return
            self._loaded_state = torchdatas_part(state_dict)
        if is_torchdatas(state_dict):
            state_dict = self._from_torchdata(state_dict)
        ready = self.progress.load(state_dict)
        self._announced_epoch = None
        self._warn_of_hidden_generators()
        if self.persistent_workers:
            self._base = None  # the saved run's workers started with another state than these
        if ready is None:
            return
        if not isinstance(self.dataset, IterableDataset):
            self.order().adopt(ready)
            return
        source, generator, rank = self._stream_source(), ready.get("generator"), ready.get("rank")
        warn_of_new_workers(self, source.base, self.progress.epoch)
        if source.generator is not None and generator is not None:
            source.generator.set_state(generator)
        is_mine = rank is None or tuple(rank) == self.rank_and_size()
        if source.is_stateful and is_mine and ready.get("dataset") is not None:
            self.stream_end.restore(source.base, ready.get("dataset"))

    def _warn_of_hidden_generators(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            source = self._stream_source()
            found = hidden_generators(source.base, known=source.generator)  # it is a part of the position
        else:
            found = hidden_generators(self.dataset)
        if found:
            warnings.warn(
                f"The dataset has a random generator of its own ({', '.join(found)}), which no checkpoint holds. "
                "From now on its numbers differ from those of the saved run. Draw from torch's, NumPy's or "
                "Python's global streams, or give the dataset state_dict() and load_state_dict().",
                ResumeWarning,
                stacklevel=3,
            )

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` under its documented name."""
        return self.state_dict()

    # -- sizes and samplers ----------------------------------------------------------------------------

    @property
    def own_rows(self) -> tuple[int, int] | None:
        """The numbers of valid rows (which come first) and of all rows of this rank's batch; None if unknown."""
        coverage = self.coverage
        if coverage is None:
            return None
        index = self._own_index() if len(coverage.size) > 1 else 0
        return coverage.valid[index], coverage.size[index]

    def _own_index(self) -> int:
        shard = self.shard
        return self.presharded_rank if shard is None else shard.process_index

    @property
    def shard(self) -> BatchSamplerShard | IterableDatasetShard | None:
        """The batch sampler or dataset that shards the data over the ranks; None if the data isn't sharded here."""
        root, _ = unskipped(self.index_sampler)
        if isinstance(root, BatchSamplerShard):
            return root
        return self.dataset if isinstance(self.dataset, IterableDatasetShard) else None

    @property
    def planned_batches(self) -> PositionedBatchSampler | None:
        """The sampler that plans batches of different sizes, if there is one."""
        sampler = self._own_sampler()
        return sampler if isinstance(sampler, PositionedBatchSampler) else None

    def _own_sampler(self) -> Any:
        """Return the user's own batch sampler or sampler, without skipped batches and shards."""
        root, _ = unskipped(self.index_sampler)
        return root.batch_sampler if isinstance(root, BatchSamplerShard) else root

    @property
    def total_batch_size(self) -> int:
        """The number of samples per step over all ranks; the average, if planned batches differ."""
        if self.shard is not None:
            return self.shard.global_batch_size
        return (getattr(self._own_sampler(), "batch_size", None) or self.batch_size or 1) * self.presharded_size

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the dataset, over all ranks."""
        total = getattr(self.dataset, "total_length", None)
        if total is not None:
            return total
        dataset = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return len(cast("Any", dataset))

    def __len__(self) -> int:
        length = self.dataset.num_steps if isinstance(self.dataset, IterableDatasetShard) else super().__len__()
        return max(length - self.skip_batches, 0) if isinstance(self.dataset, IterableDataset) else length

    def _known_remainder(self) -> int:
        if self._drop_last or self.planned_batches is not None:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:  # an iterable dataset without a length
            return -1

    def get_sampler(self) -> Any:
        """Return the sampler of single samples."""
        return get_sampler(self)

    def set_sampler(self, sampler: Iterable[object]) -> None:
        """Draw the samples from ``sampler`` from now on."""
        if self.batch_sampler is not None:
            self._own_sampler().sampler = sampler
        self.show(sampler=sampler)

    def copy_with(self, **attributes: object) -> PreparedLoader:
        """Return a copy of the loader with other attributes, at the same epoch and position."""
        copied = object.__new__(type(self))
        vars(copied).update(self.__dict__, _base=None, _recorder=RecordingSampler(), _newest_pass=None, **attributes)
        return copied

    def __getstate__(self) -> dict[str, object]:
        of_this_process = dict.fromkeys(("_newest_pass", "_active_prefetch", "device_prefetch", "current_batch"))
        return {**super().__getstate__(), "_recorder": RecordingSampler(), **of_this_process}


class DataLoaderShard(PreparedLoader):
    """A prepared loader for which each process reads its own data."""


def get_sampler(dataloader: DataLoader[object] | SequenceShardLoader) -> Any:
    """Return the innermost sampler of ``dataloader``, of single samples; None for an iterable dataset."""
    if isinstance(dataloader.dataset, IterableDataset):
        return None
    return samplers_of(getattr(dataloader, "batch_sampler", None) or dataloader.sampler)[-1]
