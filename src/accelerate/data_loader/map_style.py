"""Read a map-style dataset with the batch info of each batch, from any position of the epoch."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.utils.data import DataLoader

from ..distributed.random import broadcast_value, capture_host_streams, host_streams
from ..errors import ResumeWarning
from ..nested import send_to_device
from ..torch_private.modules import has_running_iterator
from .iterable import wrong_batches_error
from .random_streams import KeyedIndices, OneByOne, SampleKeys
from .reader import Delivery, ReadPlan, is_on_host
from .sampling import BEGINNING, BatchInfo, OrderState, ResumePosition, batches_from, same_order, unskipped
from .sharding import BatchSamplerShard, draw_unsharded

if TYPE_CHECKING:
    from .loader import PreparedLoader


@final
class RecordingSampler:
    """The batch sampler for torch's loader, which yields indices and queues the batch infos in the same order."""

    def __init__(self) -> None:
        self.draw: Callable[[], Iterator[BatchInfo]] = _nothing
        self.key: Callable[[BatchInfo], Any] | None = None  # wraps the indices to be read
        self.batch_infos: deque[BatchInfo] = deque()

    def __iter__(self) -> Iterator[object]:
        # A new queue for every pass: workers may still have batches of an abandoned pass.
        batch_infos, key = deque[BatchInfo](), self.key
        self.batch_infos = batch_infos
        for batch_info in self.draw():
            batch_infos.append(batch_info)
            yield batch_info.indices if key is None else key(batch_info)

    def leave(self, draw: Callable[[], Iterator[BatchInfo]]) -> None:
        """Drop all references to the pass of ``draw``, unless another pass has begun.

        Otherwise the garbage collector would free the loader, which waits ten seconds for workers.
        """
        if self.draw == draw:
            self.draw, self.key = _nothing, None


def _nothing() -> Iterator[BatchInfo]:
    return iter(())


@final
class IndexReader:
    """One pass over a map-style dataset."""

    def __init__(self, loader: PreparedLoader, plan: ReadPlan) -> None:
        self.loader: PreparedLoader = loader
        self.plan = plan
        self.root: Any = unskipped(loader.index_sampler)[0]
        self._first: Sequence[Any] = []  # the indices of the epoch's first batches
        self._before_workers: Any = None  # the stream's state, while the workers' seed is drawn from another one

    # -- reading ---------------------------------------------------------------------------------------

    def read(self) -> Generator[Delivery, None, None]:
        """Yield every batch, on the plan's device, with its batch info."""
        plan, own = self.plan, self.loader.own_loader
        device, non_blocking, on_host = plan.device, plan.non_blocking, plan.stays_on_host
        batches, recorder = self._open()
        try:
            for batch in batches:
                if device is not None and not (on_host and is_on_host(batch)):
                    batch = send_to_device(batch, device, non_blocking=non_blocking)
                if own is not None and not recorder.batch_infos:
                    raise wrong_batches_error(own, "gave a batch that its batch sampler didn't ask for")
                yield batch, recorder.batch_infos.popleft()
            if own is not None and recorder.batch_infos:
                raise wrong_batches_error(own, f"left out {len(recorder.batch_infos)} batches of its batch sampler")
        finally:
            recorder.leave(self.draw)

    def first_batches(self, num_batches: int, num_rows: int) -> list[object]:
        """Read the first batches of the epoch again; this doesn't advance the random streams."""
        loader, is_batched = self.loader, self.loader.batch_sampler is not None
        with host_streams(capture_host_streams()):
            dataset, batches = cast("Any", loader.dataset), list(self._first[:num_batches])
            if is_batched:
                batches = _first_rows(batches, num_rows)
            if loader.sample_seed is not None:
                batches = loader.sample_seed.keyed(batches, loader.progress.epoch)
            samples = [[dataset[index] for index in batch] if is_batched else dataset[batch] for batch in batches]
            return [self.plan.place(loader.collate_fn(one)) for one in samples]

    def _open(self) -> tuple[Iterator[object], RecordingSampler]:
        loader, dataset = self.loader, self.loader.dataset
        recorder = loader.recorder()
        recorder.draw = self.draw
        is_batched = loader.batch_sampler is not None
        keys = self._sample_keys()
        if keys is not None and is_batched and getattr(dataset, "__getitems__", None) is not None:
            dataset = OneByOne(dataset)
        sampling = {"batch_sampler": recorder} if is_batched else {"sampler": recorder, "batch_size": None}
        reader = loader.torch_loader(dataset, loader.collate_fn, **sampling)
        recorder.key = keys or (self._batch_keys() if loader.num_workers and loader.reseed_workers else None)
        with self._beginning(reader):
            batches = iter(reader)
        return batches if keys is None else keys.undisturbed(batches), recorder

    @contextmanager
    def _beginning(self, reader: DataLoader[object]) -> Iterator[None]:
        """Enter a context for the start of torch's loader, which draws its workers' seed."""
        loader, saved, progress = self.loader, self.plan.saved, self.loader.progress
        starts_workers = loader.num_workers > 0 and not (loader.persistent_workers and has_running_iterator(reader))
        known = progress.loaded_own if saved is not None or loader.persistent_workers else {}
        # A resumed pass must not draw more from the streams than the saved pass did.
        with host_streams(capture_host_streams(() if saved is None else ("torch",))):
            if starts_workers:
                generator, rank = loader.generator or torch.default_generator, list(loader.rank_and_size())
                if known.get("rank") == rank and known.get("workers") is not None:
                    # The order is drawn from there; the workers get the seed of the saved run.
                    self._before_workers = generator.get_state() if saved is None else None
                    generator.set_state(known["workers"])
                else:
                    progress.own = {"rank": rank, "workers": generator.get_state()}
            yield
        self._leave_workers_stream()

    def _leave_workers_stream(self) -> None:
        """Continue the stream from before the workers' seed was drawn, if that hasn't been done."""
        state, self._before_workers = self._before_workers, None
        if state is not None:
            (self.loader.generator or torch.default_generator).set_state(state)

    # -- random streams of samples and workers ---------------------------------------------------------

    def _dp_rank_and_size(self) -> tuple[int, int]:
        """Return the data-parallel rank and size of the samples drawn here."""
        if isinstance(self.root, BatchSamplerShard):
            return self.root.process_index, self.root.num_processes
        return self.loader.presharded_rank, self.loader.presharded_size

    def _batch_keys(self) -> Callable[[BatchInfo], KeyedIndices]:
        """Return a function that adds to a batch's indices its number among all ranks' batches; call it in order."""
        progress, (index, stride) = self.loader.progress, self._dp_rank_and_size()
        if isinstance(self.root, BatchSamplerShard) and not self.root.split_batches:
            stride = 1
        epoch, num_drawn = progress.epoch, -1

        def keyed(batch_info: BatchInfo) -> KeyedIndices:
            nonlocal num_drawn
            if num_drawn < 0:
                num_drawn = progress.position.batches
            number, num_drawn = num_drawn * stride + index, batch_info.batches
            return KeyedIndices(batch_info.indices, epoch, number)

        return keyed

    def _sample_keys(self) -> SampleKeys | None:
        """Return such a function for single samples, if each has its own random streams; else None."""
        loader = self.loader
        if loader.sample_seed is None:
            return None
        return SampleKeys(
            loader.sample_seed,
            loader.progress,
            *self._dp_rank_and_size(),
            first_sample=self.root.first_sample if isinstance(self.root, BatchSamplerShard) else None,
            is_batched=loader.batch_sampler is not None,
            in_process=loader.num_workers == 0,
        )

    # -- indices ---------------------------------------------------------------------------------------

    def draw(self) -> Iterator[BatchInfo]:
        """Return an iterator over the batch infos, without references to the loader.

        A resumed pass has the order of the saved pass. It repeats the draws that the saved pass had made, and makes all
        later draws from the streams as they are now.
        """
        loader, saved, progress = self.loader, self.plan.saved, self.loader.progress
        self._leave_workers_stream()
        order = loader.order()
        world = loader.agreeing_world(order)
        begins: AbstractContextManager[None] = nullcontext()
        if saved is not None:
            order_state = saved.order.copy()
            begins = order.starting_from(order_state)
        else:
            order_state = mine = order.capture()
            if world is not None:
                order_state = broadcast_value(mine, world)
                order.note_agreement()
                if not world.is_main:
                    begins = order.starting_as_on_main(order_state, mine)
        position = loader.start_position(self.plan.num_skipped, saved)
        progress.order_state, progress.position = order_state, position
        with begins:
            draws = self._assign(position, order_state)
            first = list(islice(draws, 0 if saved is not None and "drawn" in saved.order else 1))
        return chain(first, draws)

    def _assign(self, position: ResumePosition, order_state: OrderState) -> Iterator[BatchInfo]:
        loader, root = self.loader, self.root
        saved = None if self.plan.num_skipped else self.plan.saved
        is_sharded, dp_size = isinstance(root, BatchSamplerShard), loader.presharded_size
        if is_sharded:
            remaining = batches_from(root.batch_sampler, position, root.num_first_batches)
            loader.progress.position = remaining.position
        else:  # a rank-aware sampler counts only its own rank's samples
            own = ResumePosition(position.steps, position.batches, position.samples // dp_size)
            remaining = batches_from(root, own, 0 if position == BEGINNING else self.plan.num_first_batches)
            remaining.position, self._first = position, remaining.first_batches
        is_same = remaining.draw_again(order_state) or saved is None or saved.dp_size != loader.dp_size()
        draws = root.assign(remaining) if is_sharded else draw_unsharded(remaining, dp_size, loader.coverage_of)
        if saved is not None and not (is_same and same_order(saved.fingerprint, remaining.fingerprint)):
            warnings.warn(
                "The sampler doesn't give the order of the run that was saved: samples of this epoch may be seen "
                "twice or not at all. If it draws between other draws of the script, draw when __iter__ begins, or "
                "from its attribute `generator`. Otherwise it needs state_dict() and load_state_dict().",
                ResumeWarning,
                stacklevel=2,
            )
        if position != BEGINNING or not self.plan.num_first_batches:
            return draws
        first = self._first = list[Any]()
        return chain(_noted(islice(draws, self.plan.num_first_batches), first), draws)


def _noted(batch_infos: Iterator[BatchInfo], indices: list[Any]) -> Iterator[BatchInfo]:
    """Yield ``batch_infos``, and append their indices to ``indices``."""
    for batch_info in batch_infos:
        indices.append(batch_info.indices)
        yield batch_info


def _first_rows(batches: list[Any], num_rows: int) -> list[Any]:
    """Return the first ``num_rows`` indices of the batches, still in batches."""
    found: list[Any] = []
    for batch in batches:
        found.append(list(batch)[:num_rows])
        num_rows -= len(found[-1])
        if num_rows <= 0:
            break
    return found
