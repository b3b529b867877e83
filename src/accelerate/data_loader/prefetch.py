"""The loop of a prepared loader: what is last is known while it is in hand, batches are on the device, and the
place in the epoch can be saved and found again."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Generator, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, cast

import torch
from torch.utils.data import IterableDataset

from accelerate.gradients import GradientState
from accelerate.nested import send_to_device
from accelerate.seeding import capture_host_streams, from_main, synchronize_rng_states
from accelerate.world import World, current_world

from .adapter import DataLoaderAdapter, DataLoaderStateMixin
from .audit import hidden_generators
from .indexed import IndexFeed, IndexReader, is_on_host
from .order import BEGINNING, Drawn, Order, Place, SkipBatchSampler, samplers_of, unskipped
from .position import Progress, Restored
from .sample_streams import SampleSeed
from .shard import Account, BatchSamplerShard, IterableDatasetShard
from .staging import Stage, stage_for, staged
from .stream import ResumeWarning, StreamEnd, StreamReader, StreamSource
from .torchdata import generator_in, is_torchdatas, num_batches_in, own_form, torchdatas_form

Delivery = tuple[Any, Drawn]
_HOST: Final = torch.device("cpu")
_OURS = (BatchSamplerShard, SkipBatchSampler)


class BatchFeeder(DataLoaderStateMixin, DataLoaderAdapter, ABC):
    """A prepared loader: a torch DataLoader whose batches are on the device and carry their account.

    While a batch is in hand, ``end_of_dataloader`` tells whether it is the last one and ``coverage`` which rows of
    it, on every rank, are real samples.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient_state: GradientState | None = None,
        prefetch_to_device: int = 0,
        sample_seed: SampleSeed | None = None,
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
        self.sample_seed = sample_seed  # where every sample is read with streams of its own
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._is_accelerate_prepared = True
        self.progress = Progress(epoch=iteration)
        self.rank_shares = 1  # how many ranks read a part of their own, where nothing here deals the parts
        self.rank_index = 0  # which of these parts this rank reads
        self.account: Account | None = None  # the account of batches that a rank-aware sampler dealt
        self._feed = IndexFeed()
        self._announced_epoch: int | None = None
        self._newest_pass: object = None
        self._head: list[Any] = []
        self._stream: StreamReader | None = None
        self.stream_end = StreamEnd()
        self.stage: Stage | None = None  # the strategy's own way of bringing batches to the device
        self._stage: Stage | None = None  # copies the batches of the running pass; else they are copied as read
        self.data_wait_seconds = 0.0  # how long the loop has waited for batches, in the running or the last pass

    _stages_batches = True
    _skip_batches = 0

    @property
    def skip_batches(self) -> int:
        """How many batches every pass leaves out at its beginning."""
        return self._skip_batches

    @skip_batches.setter
    def skip_batches(self, value: int) -> None:
        if not isinstance(self.dataset, IterableDataset):  # others by skip_first_batches stay left out as well
            root, num_skipped = unskipped(self.index_sampler)
            num_skipped += value - self._skip_batches
            skip = SkipBatchSampler(root, num_skipped) if num_skipped else root
            self.show(**{"sampler" if self.batch_sampler is None else "batch_sampler": skip})
        self._skip_batches = value

    # -- the loop --------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Any, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        progress, gradient_state = self.progress, self.gradient_state
        restored = self._begin_pass()
        stage = self._stage = self._stage_of_pass()
        batches = self._read(restored)
        if stage is not None:
            batches = staged(batches, stage, self.prefetch_to_device if self.num_workers else 0)
        shown = vars(self)  # torch checks every assignment to an attribute of a loader, which costs more than the rest
        this_pass = shown["_newest_pass"] = object()
        self.begin()
        shown["data_wait_seconds"] = 0.0
        asked = perf_counter()
        epoch, beginning = progress.epoch, None
        try:
            for batch, drawn in batches:
                shown["data_wait_seconds"] += perf_counter() - asked
                shown["end_of_dataloader"] = drawn.is_last
                shown["coverage"] = drawn.coverage
                shown["batch_in_hand"] = batch
                if beginning is None:  # known once the first batch is drawn
                    beginning = progress.beginning()
                elif shown["_newest_pass"] is not this_pass:
                    progress.return_to(beginning)
                shown["_newest_pass"] = this_pass
                progress.drawn = drawn
                if gradient_state.active_dataloader is not self:  # another loop delivered in between
                    gradient_state._add_dataloader(self, is_interleaved=True)
                yield batch
                asked = perf_counter()
            progress.finish(epoch)
        finally:
            batches.close()
            if self._newest_pass is this_pass:  # else another pass over this loader is in the middle of its loop
                shown["_stream"] = None  # it knows the loader, which is to be gone as soon as nobody else does
                self.end()

    def _stage_of_pass(self) -> Stage | None:
        if not self._stages_batches or self.device is None:
            return None
        return self.stage or (stage_for(self.device) if self.prefetch_to_device else None)

    def _begin_pass(self) -> Restored | None:
        """The position that the pass continues from, if there is one.

        A position after the last batch of an epoch is the beginning of the next one.
        """
        restored = self.progress.start()
        self._announce_epoch()
        if restored is None or not restored.is_finished:
            return restored
        # The order of the next epoch follows from that of the finished one, which the saved run had drawn.
        # Workers that stay were started in the saved run's first pass, so they are started in this one.
        reads = isinstance(self.dataset, IterableDataset) or self.persistent_workers
        for _ in self._read(restored) if reads else IndexReader(self, restored).draw():
            pass
        self.progress.finish(self.progress.epoch)
        return self._begin_pass()

    def _read(self, restored: Restored | None) -> Generator[Delivery, None, None]:
        """Every batch of the pass, on the device, with what was known when it was drawn."""
        self._synchronize()
        if isinstance(self.dataset, IterableDataset):
            return self._read_stream(restored)
        return self.read_map(restored)

    def _synchronize(self) -> None:
        world = self._world()
        others = [name for name in self.stream_names if name != "generator"]
        if world is not None and others:
            synchronize_rng_states(others, world=world)

    def place_batch(self, batch: Any) -> Any:
        """``batch`` on the device of this loader."""
        if self.device is None or self._stage is not None or (self._stays_on_host and is_on_host(batch)):
            return batch
        return send_to_device(batch, self.device, non_blocking=self._non_blocking)

    @property
    def _stays_on_host(self) -> bool:
        return self.device is not None and self.device == _HOST

    def rank_and_size(self) -> tuple[int, int]:
        """Who this process is among those that run."""
        world = self._world()
        return (0, 1) if world is None else (world.rank, world.size)

    @staticmethod
    def _world() -> World | None:
        world = current_world()
        return world if world is not None and world.is_distributed else None

    # -- datasets that are read by index ---------------------------------------------------------------

    def read_map(self, restored: Restored | None) -> Generator[Delivery, None, None]:
        """Every batch of a dataset that is read by index."""
        return IndexReader(self, restored).read(self.device if self._stage is None else None)

    @property
    def index_sampler(self) -> Any:
        """What gives the batches of indices: the batch sampler, or the sampler of a loader that doesn't batch."""
        return self.batch_sampler if self.batch_sampler is not None else self.sampler

    def order(self) -> Order:
        """What the order of an epoch depends on."""
        return Order(self.index_sampler, self.synchronized_generator, _OURS, self.sample_seed)

    @property
    def stream_names(self) -> list[str]:
        """The streams that all ranks take over from rank 0 when a pass begins."""
        return [str(getattr(kind, "value", kind)) for kind in self.rng_types or ()]

    def agreeing_world(self, order: Order) -> World | None:
        """The world whose ranks have to draw one order; None where there is nothing to agree on."""
        if not order.needs_agreement or (self.rng_types is not None and "generator" not in self.stream_names):
            return None
        return self._world()

    def entrance(self, root: Any, skipped: int, restored: Restored | None) -> Place:
        """Where the pass begins; batches that were skipped by hand are counted from the epoch's beginning."""
        if skipped:
            groups = skipped * (root.groups_per_round if isinstance(root, BatchSamplerShard) else 1)
            return Place(skipped, groups, skipped * self._samples_per_round(root))
        if restored is None:
            return BEGINNING
        return restored.place_for(self._shares(), self._samples_per_round(root))

    def _samples_per_round(self, root: Any) -> int:
        size = getattr(root, "batch_size", None) or 1
        return size * (root.groups_per_round if isinstance(root, BatchSamplerShard) else self.rank_shares)

    # -- datasets that are read as a stream ------------------------------------------------------------

    def _stream_source(self) -> StreamSource:
        return StreamSource(self.dataset, self.batch_size, self.rank_shares)

    def _read_stream(
        self, restored: Restored | None, skip_batches: int | None = None
    ) -> Generator[Delivery, None, None]:
        source = self._stream_source()
        world = self._world()
        source.seed_generator()
        begun: dict[str, Any] = {"streams": capture_host_streams()}
        if source.generator is not None:
            begun["generator"] = source.generator.get_state()
            if world is not None and self._draws_on_every_rank:
                begun["generator"] = from_main(begun["generator"], world)
                source.generator.set_state(begun["generator"])
        if source.num_readers == 1 and source.is_stateful and self.num_workers == 0:
            begun["dataset"] = self.stream_end.state_of(source.base)  # for the samples that complete the last round
        self.progress.begun = begun if restored is None else restored.order
        skip = self.skip_batches if skip_batches is None else skip_batches
        self._stream = reader = StreamReader(self, source, restored, skip, self._num_head)
        self.progress.place = reader.place
        return reader.read()

    _draws_on_every_rank = True
    _num_head = 0  # groups at the beginning of the epoch that are noted where a pass begins later

    # -- the epoch -------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The epoch of the running pass, or of the next one."""
        restored = self.progress.restored
        return self.progress.epoch + (restored is not None and restored.is_finished)

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.progress.epoch = value

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``; the samplers, or else the dataset, are told."""
        self.progress.set_epoch(epoch)
        self._announced_epoch = None
        self._announce_epoch()

    def _announce_epoch(self) -> None:
        epoch, seedable = self.progress.epoch, self.order().seedable
        # A seeded sampler goes on to its next epoch when its last index is drawn, which is before the pass ends.
        if epoch == self._announced_epoch and (seedable is None or seedable.epoch == epoch):
            return
        self._announced_epoch = epoch
        listeners = [getattr(sampler, "set_epoch", None) for sampler in samplers_of(self.index_sampler)]
        listeners = [listener for listener in listeners if listener is not None]
        if not listeners:
            listeners = [getattr(self.dataset, "set_epoch", None)]
        for listener in listeners:
            if listener is not None:
                listener(epoch)

    # -- the position ----------------------------------------------------------------------------------

    def _shares(self) -> int:
        root, _ = unskipped(self.index_sampler)
        if isinstance(root, BatchSamplerShard):
            return root.num_processes
        return getattr(self.dataset, "num_processes", self.rank_shares)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the place after the batch in hand, and how the order of this epoch began."""
        is_stream = isinstance(self.dataset, IterableDataset)
        ready = {} if self.progress.is_inside else self._ready_stream() if is_stream else self.order().capture()
        ready.pop("streams", None)  # between epochs the next order is drawn from the streams of the process
        own = self.progress.state(self._shares(), ready)
        return {**self._torchdata_state(), **own} if self.use_stateful_dataloader else own

    def _torchdata_state(self) -> dict[str, Any]:
        """The position as torchdata's loader, over the same data, reads it; empty before workers have started."""
        progress = self.progress
        if isinstance(self.dataset, IterableDataset):
            own = {} if progress.drawn is None else (progress.drawn.own or {})
            if progress.restored is not None:
                own = progress.restored.own
            return dict(own.get("loader") or torchdatas_form(self._base, self.num_workers))
        drawn, (root, _) = progress.drawn, unskipped(self.index_sampler)
        whole = None if isinstance(root, BatchSamplerShard) or self.rank_shares > 1 else root
        num_batches = 0 if drawn is None else self._num_read(drawn)
        return torchdatas_form(self._base, self.num_workers, drawn, num_batches, whole, progress.begun)

    def _num_read(self, drawn: Drawn) -> int:
        """How many batches the reader of this rank has given."""
        return drawn.rounds

    def _place_after(self, num_batches: int) -> Place:
        """The place after as many batches of the reader of this rank."""
        root, _ = unskipped(self.index_sampler)
        groups = num_batches * (root.groups_per_round if isinstance(root, BatchSamplerShard) else 1)
        return Place(num_batches, groups, num_batches * self.total_batch_size)

    def _from_torchdata(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A position that torchdata's loader wrote, or the peer's with it, as one of this loader's."""
        own: dict[str, Any] = {}
        if isinstance(self.dataset, IterableDataset):
            own = {"rank": list(self.rank_and_size()), "loader": dict(state)}
        elif generator_in(state) is None and self.order().is_random and self.order().seedable is None:
            warnings.warn(
                "load_state_dict: this position of torchdata's StatefulDataLoader doesn't hold the order of its epoch, "
                "so samples of the epoch may be seen twice or not at all. Positions of prepared loaders hold it.",
                ResumeWarning,
                stacklevel=4,
            )
        place = self._place_after(num_batches_in(state))
        return own_form(state, place, self._shares(), self.progress.epoch, own)

    def _ready_stream(self) -> dict[str, Any]:
        """What the stream's next pass depends on, between two passes."""
        source = self._stream_source()
        ready: dict[str, Any] = {} if source.generator is None else {"generator": source.generator.get_state()}
        state = self.stream_end.state_of(source.base) if source.is_stateful and self.num_workers == 0 else None
        if state:
            ready.update(dataset=state, rank=list(self.rank_and_size()) if source.num_readers > 1 else None)
        return ready

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next pass continues where ``state_dict`` was taken, in the same order; data isn't read for that.

        Streams that keep no state of their own are read, and thrown away, up to that place.
        """
        if is_torchdatas(state_dict):
            state_dict = self._from_torchdata(state_dict)
        ready = self.progress.load(state_dict)
        self._announced_epoch = None
        self._say_what_is_hidden()
        if self.persistent_workers:
            self._base = None  # the workers of the saved run began otherwise than those that live
        if ready is None:
            return
        if not isinstance(self.dataset, IterableDataset):
            self.order().adopt(ready)
            return
        source = self._stream_source()
        if source.generator is not None and ready.get("generator") is not None:
            source.generator.set_state(ready["generator"])
        is_mine = ready.get("rank") is None or tuple(ready["rank"]) == self.rank_and_size()
        if source.is_stateful and is_mine and ready.get("dataset") is not None:
            self.stream_end.bring(source.base, ready["dataset"])

    def _say_what_is_hidden(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            source = self._stream_source()
            found = hidden_generators(source.base, known=source.generator)  # that one is a part of the position
        else:
            found = hidden_generators(self.dataset)
        if found:
            warnings.warn(
                f"The dataset has a random generator of its own ({', '.join(found)}), which no checkpoint holds: what "
                "it draws from now on differs from what the saved run would have drawn. Draw from torch's, NumPy's or "
                "Python's global streams, or give the dataset state_dict() and load_state_dict().",
                ResumeWarning,
                stacklevel=3,
            )

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """The same as :meth:`state_dict`, under the documented name."""
        return self.state_dict()

    # -- what callers ask ------------------------------------------------------------------------------

    @property
    def own_rows(self) -> tuple[int, int] | None:
        """Of this rank's batch in hand: how many leading rows are real, and how many there are; None if unknown."""
        coverage = self.coverage
        if coverage is None:
            return None
        index = self._own_index() if len(coverage.size) > 1 else 0
        return coverage.real[index], coverage.size[index]

    def _own_index(self) -> int:
        root, _ = unskipped(self.index_sampler)
        shard = root if isinstance(root, BatchSamplerShard) else self.dataset
        own = shard.process_index if isinstance(shard, (BatchSamplerShard, IterableDatasetShard)) else None
        return self.rank_index if own is None else own

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks take at once."""
        root, _ = unskipped(self.index_sampler)
        if isinstance(root, BatchSamplerShard):
            return (root.batch_size or 1) * root.groups_per_round
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.samples_per_round
        return (getattr(root, "batch_size", None) or self.batch_size or 1) * self.rank_shares

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all ranks."""
        total = getattr(self.dataset, "total_length", None)
        if total is not None:
            return total
        dataset = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return len(cast("Any", dataset))

    def __len__(self) -> int:
        length = self.dataset.num_rounds if isinstance(self.dataset, IterableDatasetShard) else super().__len__()
        return max(length - self.skip_batches, 0) if isinstance(self.dataset, IterableDataset) else length

    def _known_remainder(self) -> int:
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:  # a stream that doesn't know its length
            return -1

    def get_sampler(self) -> Any:
        """The sampler that draws single samples."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """``sampler`` draws the samples from now on."""
        root, _ = unskipped(self.index_sampler)
        if self.batch_sampler is not None:
            inner = root.batch_sampler if isinstance(root, BatchSamplerShard) else root
            inner.sampler = sampler
        self.show(sampler=sampler)

    def copy_with(self, **attributes: Any) -> BatchFeeder:
        """The same loader, in the same epoch and at the same place in it, with other attributes."""
        twin = object.__new__(type(self))
        vars(twin).update(self.__dict__, _base=None, _feed=IndexFeed(), _newest_pass=None, **attributes)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = dict.fromkeys(("_newest_pass", "_stream", "_stage", "stage", "batch_in_hand"))
        return {**super().__getstate__(), "_feed": IndexFeed(), **of_this_process}


class DataLoaderShard(BatchFeeder):
    """A prepared loader that reads for its own process."""


def get_sampler(dataloader: Any) -> Any:
    """The sampler of ``dataloader`` that draws single samples, wherever it is wrapped; None for a stream."""
    if isinstance(dataloader.dataset, IterableDataset):
        return None
    samplers = samplers_of(getattr(dataloader, "batch_sampler", None) or dataloader.sampler)
    return samplers[-1] if samplers else None
