"""Reading a dataset by index: what was drawn, with its account, from the beginning of the epoch or any place on."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch.utils.data import DataLoader

from accelerate.nested import send_to_device
from accelerate.seeding import from_main, host_stream, host_streams
from accelerate.torch_private.data import has_running_iterator

from .order import BEGINNING, Drawn, Place, agree, enter, unskipped
from .own_reading import gave_other_batches
from .position import Restored
from .sample_streams import OneByOne, SampleKeys
from .shard import BatchSamplerShard, draw_whole
from .stream import ResumeWarning
from .worker_streams import KeyedIndices

if TYPE_CHECKING:
    from .prefetch import BatchFeeder

_END: Final = object()


@final
class IndexFeed:
    """What torch takes for a batch sampler: the indices of what is drawn, with the accounts kept in the same order."""

    def __init__(self) -> None:
        self.draw: Callable[[], Iterator[Drawn]] = _nothing
        self.key: Callable[[Drawn], Any] | None = None  # the indices as they are read
        self.accounts: deque[Drawn] = deque()
        self._running: Iterator[Drawn] = iter(())

    def __iter__(self) -> Iterator[Any]:
        # A new queue for every pass: workers may still hold batches of a pass that was left.
        accounts, key = deque[Drawn](), self.key
        self.accounts = accounts
        draws = self._running = self.draw()
        for drawn in draws:
            accounts.append(drawn)
            yield drawn.indices if key is None else key(drawn)

    def leave(self, draw: Callable[[], Iterator[Drawn]]) -> None:
        """Nothing here holds on to the pass that ``draw`` belongs to, unless another one has begun.

        A loader that its feed held on to would be left to the garbage collector, which waits ten seconds for workers.
        """
        if self.draw == draw:
            self.draw, self.key = _nothing, None
            if isinstance(self._running, Generator):
                self._running.close()


def _nothing() -> Iterator[Drawn]:
    return iter(())


def is_on_host(batch: Any) -> bool:
    """Whether ``batch`` is a host tensor, or a plain container of them: such a batch needs no walk to be placed."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.is_cpu
    if kind is dict:
        batch = batch.values()
    elif kind is not list and kind is not tuple:
        return False
    for item in batch:  # noqa: SIM110  (a generator would cost a call per item, in every step)
        if type(item) is not torch.Tensor or not item.is_cpu:
            return False
    return True


@final
class IndexReader:
    """One pass over a dataset that is read by index."""

    def __init__(self, feeder: BatchFeeder, restored: Restored | None) -> None:
        self.feeder, self.restored = feeder, restored
        self.root, self.num_skipped = unskipped(feeder.index_sampler)

    # -- reading ---------------------------------------------------------------------------------------

    def read(self, device: torch.device | None) -> Generator[tuple[Any, Drawn], None, None]:
        """Every batch, on ``device`` where one is given, with what was known when it was drawn."""
        feeder = self.feeder
        non_blocking, on_host, own = feeder._non_blocking, feeder._stays_on_host, feeder.own_loader
        batches, feed = self._open()
        try:
            for batch in batches:
                if device is not None and not (on_host and is_on_host(batch)):
                    batch = send_to_device(batch, device, non_blocking=non_blocking)
                if own is not None and not feed.accounts:
                    raise gave_other_batches(own, "gave a batch that its batch sampler didn't ask for")
                yield batch, feed.accounts.popleft()
            if own is not None and feed.accounts:
                raise gave_other_batches(own, f"left out {len(feed.accounts)} batches of its batch sampler")
        finally:
            feed.leave(self.draw)

    def _open(self) -> tuple[Iterator[Any], IndexFeed]:
        feeder, dataset = self.feeder, self.feeder.dataset
        # Loops over one loader may be nested, so each has its feed; a reader that is kept keeps its feed.
        feed = feeder._feed if feeder._keeps_reader else IndexFeed()
        feed.draw = self.draw
        is_batched = feeder.batch_sampler is not None
        keys = self._sample_keys()
        if keys is not None and is_batched and getattr(dataset, "__getitems__", None) is not None:
            dataset = OneByOne(dataset)
        sampling = {"batch_sampler": feed} if is_batched else {"sampler": feed, "batch_size": None}
        reader = feeder.reader(dataset, feeder.collate_fn, **sampling)
        feed.key = keys or (self._batch_keys() if feeder.num_workers else None)
        with self._beginning(reader):
            batches = iter(reader)
        return batches if keys is None else keys.undisturbed(batches), feed

    @contextmanager
    def _beginning(self, reader: DataLoader[Any]) -> Iterator[None]:
        """A block in which torch's loader begins, and draws the seed of its workers."""
        feeder, restored = self.feeder, self.restored
        progress, generator, rank = feeder.progress, feeder.generator, list(feeder.rank_and_size())
        starts_workers = feeder.num_workers > 0 and not has_running_iterator(reader)
        known = progress.own.get("workers") if progress.own.get("rank") == rank else None
        if starts_workers and known is not None and (restored is not None or feeder.persistent_workers):
            # Workers of the saved run, begun again: this run draws nothing for them.
            before = None if generator is None else generator.get_state()
            with host_streams({"torch": known if generator is None else host_stream("torch")}):
                if generator is not None:
                    generator.set_state(known)
                yield
            if generator is not None and before is not None and restored is None:
                generator.set_state(before)
            return
        if starts_workers:
            state = host_stream("torch") if generator is None else generator.get_state()
            progress.own = {"rank": rank, "workers": state}
        # A pass that continues another one draws nothing from the streams that this one didn't draw.
        with _torch_stream_unchanged() if restored is not None else nullcontext():
            yield

    # -- what reading draws ----------------------------------------------------------------------------

    def _share(self) -> tuple[int, int]:
        """Which of how many ranks takes the samples that this one draws."""
        if isinstance(self.root, BatchSamplerShard):
            return self.root.process_index, self.root.num_processes
        return self.feeder.rank_index, self.feeder.rank_shares

    def _batch_keys(self) -> Callable[[Drawn], KeyedIndices]:
        """From what is drawn, in order, to the indices with the number that the batch has among all ranks' batches."""
        progress, (index, stride) = self.feeder.progress, self._share()
        if isinstance(self.root, BatchSamplerShard) and not self.root.split_batches:
            stride = 1
        epoch, groups = progress.epoch, -1

        def keyed(drawn: Drawn) -> KeyedIndices:
            nonlocal groups
            if groups < 0:
                groups = progress.place.groups
            number, groups = groups * stride + index, drawn.groups
            return KeyedIndices(drawn.indices, epoch, number)

        return keyed

    def _sample_keys(self) -> SampleKeys | None:
        """The same for single samples, where each has streams of its own."""
        feeder = self.feeder
        if feeder.sample_seed is None:
            return None
        is_dealt = isinstance(self.root, BatchSamplerShard)
        return SampleKeys(
            feeder.sample_seed,
            feeder.progress,
            *self._share(),
            is_dealt=is_dealt,
            is_batched=feeder.batch_sampler is not None,
            in_process=feeder.num_workers == 0,
        )

    # -- drawing ---------------------------------------------------------------------------------------

    def draw(self) -> Iterator[Drawn]:
        """The indices of every batch, with their accounts; the order begins as it did in the pass that is continued."""
        feeder, restored, progress = self.feeder, self.restored, self.feeder.progress
        order = feeder.order()
        world = feeder.agreeing_world(order)
        begins: AbstractContextManager[None] = nullcontext()
        if restored is not None:
            begun = restored.order
            begins = order.begun(begun)
        else:
            begun = mine = order.capture()
            if world is not None:
                begun = from_main(mine, world)
                order.note_agreement()
                if not world.is_main:
                    begins = order.begun_as_on(begun, mine)
        place = feeder.entrance(self.root, self.num_skipped, restored)
        progress.begun, progress.place = begun, place
        with begins:
            draws = self._deal(place)
            first = next(draws, None)
        if first is not None:
            yield first
            yield from draws

    def _deal(self, place: Place) -> Iterator[Drawn]:
        feeder, root = self.feeder, self.root
        restored = None if self.num_skipped else self.restored
        if isinstance(root, BatchSamplerShard):
            entered = enter(root.batch_sampler, place, root.groups_per_round)
            draws = root.deal(entered)
        else:
            shares = feeder.rank_shares  # a rank-aware sampler counts the samples of its own rank
            own = Place(place.rounds, place.groups, place.samples // shares)
            entered = enter(root, own, 0 if place == BEGINNING else feeder._num_head)
            entered.place, feeder._head = place, entered.head
            draws = draw_whole(entered, shares, feeder.account)
        if restored is not None and not agree(restored.witnesses, entered.before):
            warnings.warn(
                "The sampler doesn't give the order of the run that was saved: samples of this epoch may be seen "
                "twice or not at all. A sampler whose order depends on more than torch's, NumPy's and Python's "
                "random numbers needs state_dict() and load_state_dict().",
                ResumeWarning,
                stacklevel=2,
            )
        return draws


@contextmanager
def _torch_stream_unchanged() -> Iterator[None]:
    with host_streams({"torch": host_stream("torch")}):
        yield
