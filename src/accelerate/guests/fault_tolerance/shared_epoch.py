"""An epoch with samples assigned anew at each step: the living ranks read those of a lost rank."""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from ...data_loader.loader import PreparedLoader
from ...data_loader.reader import Delivery
from ...data_loader.resume import SavedPosition
from ...data_loader.sampling import BatchInfo
from ...distributed.random import capture_host_streams, host_streams
from ...errors import CheckpointError, CollectiveError, PreparationError

if TYPE_CHECKING:
    from ...training.accumulation import GradientState
    from .membership import Membership


@final
class SharedEpoch:
    """The samples of an epoch that no update contains yet, identical on all ranks without communication.

    A step takes up to ``batch_size`` samples for each living rank. The samples of a rank that didn't contribute a
    gradient to the update return to the front.
    """

    def __init__(self, batch_size: int, order: Sequence[int] = (), *, drop_last: bool = False) -> None:
        self.batch_size: int = batch_size
        self.drop_last: bool = drop_last
        self._order, self._position = list(order), 0
        self._open: dict[int, list[int]] = {}  # samples of the open window, by rank
        self.num_returns: int = 0  # how often samples were returned
        self.checksum: int = zlib.crc32(array("q", self._order))  # of the order and of all samples taken

    @property
    def num_left(self) -> int:
        """The number of samples not taken by any rank, or returned since."""
        return len(self._order) - self._position

    def has_step(self, members: Sequence[int]) -> bool:
        """Return whether there is another step for ``members``."""
        return self.num_left >= (self.batch_size * len(members) if self.drop_last else 1)

    def draw(self, members: Sequence[int]) -> dict[int, list[int]]:
        """Take the samples of the next step and return each member's; their numbers differ by at most one."""
        num_samples = min(self.batch_size * len(members), self.num_left)
        shares, start = {}, self._position
        for number, rank in enumerate(sorted(members)):
            size = num_samples // len(members) + (number < num_samples % len(members))
            shares[rank] = self._order[start : start + size]
            self._open.setdefault(rank, []).extend(shares[rank])
            start += size
        self._position = start
        return shares

    def commit(self, contributors: Iterable[int]) -> None:
        """Record an update with the samples of ``contributors``; the samples of other ranks are returned."""
        given = set(contributors)
        back = [index for rank, taken in sorted(self._open.items()) if rank not in given for index in taken]
        self._open.clear()
        if back:
            self._order, self._position = back + self._order[self._position :], 0
            self.num_returns += 1
        self.checksum = zlib.crc32(repr((sorted(given), self.num_left)).encode(), self.checksum)

    def copy(self) -> SharedEpoch:
        """Return a copy from which samples can be drawn ahead."""
        copied = SharedEpoch(self.batch_size, drop_last=self.drop_last)
        copied._order, copied._position = self._order, self._position  # the list is replaced, and never changed
        return copied

    @property
    def has_open(self) -> bool:
        """Whether ranks have taken samples since the last update."""
        return any(self._open.values())

    def state(self, returned: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        """Return the state from which another process continues, between two windows.

        Args:
            returned: whether the samples that a rank has taken since the last update are still to be read.
        """
        kept = {rank: own for rank, own in self._open.items() if not returned(rank)}
        taken = {str(rank): torch.tensor(own, dtype=torch.int64) for rank, own in kept.items()}
        back = [index for rank, own in sorted(self._open.items()) if rank not in kept for index in own]
        order = torch.tensor(back + self._order[self._position :], dtype=torch.int64)
        return {"order": order, "checksum": self.checksum, "open": taken}  # open: batches that all left out

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self._order, self._position = state["order"].tolist(), 0
        self._open = {int(rank): taken.tolist() for rank, taken in state.get("open", {}).items()}
        self.checksum = state["checksum"]


@final
class _Shares:
    """A batch sampler that draws one rank's batches ahead; a rank without samples reads an uncounted filler."""

    def __init__(self, epoch: SharedEpoch, members: Sequence[int], rank: int) -> None:
        self._epoch, self._members, self._rank = epoch, members, rank

    def __iter__(self) -> Iterator[list[int]]:
        while self._epoch.has_step(self._members):
            yield own_share(self._epoch.draw(self._members), self._rank)[0]


def own_share(shares: Mapping[int, list[int]], rank: int) -> tuple[list[int], int]:
    """Return the indices for ``rank`` to read, and how many of them count."""
    own = shares[rank]
    return (own, len(own)) if own else (next(share for share in shares.values() if share)[:1], 0)


@final
class SharedLoader(PreparedLoader):
    """A prepared loader of a fault-tolerant run: each sample of an epoch is part of exactly one update."""

    def __init__(self, dataset: Dataset[object], membership: Membership, data_seed: int | None, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.membership: Membership = membership
        self.data_seed: int | None = data_seed
        size = int(getattr(self.batch_sampler, "batch_size", 1))
        self.epoch_shared: SharedEpoch = SharedEpoch(size, drop_last=self._drop_last)
        self.num_own_samples: int = 0  # of the current batch
        self.is_trained: bool = False  # whether its batches were used for updates
        self.has_backward: bool = False  # whether this pass's batches are used for updates
        self._gathered: set[int] | None = None  # the ranks whose results of the open batches were gathered
        self._is_restored = False
        self.num_passes: int = 0  # passes that the script has begun, including missed ones
        self.began: int = 0  # the number of the newest pass among those of all loaders
        self._first_epoch = -1
        self._num_missed = 0  # passes that the others have finished before this process joined them

    def __iter__(self) -> Generator[Any, None, None]:
        """Iterate over an epoch; over nothing if the others finished it before this process joined."""
        if self.membership.is_joining:
            for hook in self.gradient_state.hooks.begin_pass:
                hook(self)
        self._note_start()
        if self._num_missed:
            self._num_missed -= 1
            return (batch for batch in ())
        return super().__iter__()

    def _note_start(self) -> None:
        if self._first_epoch < 0:
            self._first_epoch = self.progress.epoch

    @property
    def own_rows(self) -> tuple[int, int]:
        """The numbers of valid rows and of all rows of this rank's batch; a rank without samples reads an extra one."""
        return self.num_own_samples, max(1, self.num_own_samples)

    def note_gathered(self, ranks: Iterable[int]) -> None:
        """Record the ranks whose results were gathered; in an evaluation, the samples of others are read again."""
        if not self.membership.is_behind:
            self._gathered = set(ranks)

    _prefetches_batches = False  # reading a batch counts as taking it, so none is read in advance

    @property
    def iteration(self) -> int:
        """The epoch of the running or the next pass, in which a replacement process joins."""
        if self.membership.is_joining:
            self.membership.awaits = self
            for hook in self.gradient_state.hooks.between_batches:
                hook(self)
        return self.progress.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.progress.epoch = value

    def commit(self, positions: Mapping[int, tuple[int, int]]) -> None:
        """Record an update, after comparing its ranks' positions: the order's checksum, and the samples left.

        Raises:
            CollectiveError: ranks have different sample orders, or have taken different numbers of samples.
        """
        num_left = {rank: left for rank, (_, left) in positions.items()}
        if len({*num_left.values()}) > 1:
            raise CollectiveError(
                f"The ranks have different numbers of samples left in this epoch: {num_left}. One has read a batch "
                "without `accelerator.backward()`, or its dataset has another length. Call backward for each batch, "
                "with `0 * loss` for one that must not count."
            )
        if {checksum for checksum, _ in positions.values()} != {self.epoch_shared.checksum}:
            raise CollectiveError(
                "The ranks draw different orders of the samples, so some would be read twice and others never. Let the "
                "sampler draw from torch's, NumPy's or Python's random numbers, or give Accelerator a data_seed."
            )
        self.epoch_shared.commit(positions)

    def shared_state(self, *, begins: bool, returned: Callable[[int], bool] = lambda _: False) -> dict[str, Any]:
        """Return the position for a joining process; if a pass ``begins``, the previous one is over.

        A restored position from which no pass has continued yet is returned unchanged.

        Args:
            returned: as of `SharedEpoch.state`.
        """
        last, state = self.progress.batch_info, self.epoch_shared.state(returned)
        is_over = last is not None and last.is_last and not len(state["order"])
        is_running = self._is_restored or (last is not None and not is_over and not begins)
        running = state if is_running else None
        return {"epoch": self.progress.epoch + is_over, "running": running, "trained": self.is_trained}

    def shared_passes(self, *, begins: bool) -> tuple[int, int]:
        """Return the number of passes that the script has finished, and the epoch of its first one."""
        is_inside = not begins and any(one is self for one in self.gradient_state.loaders.all())
        return self.num_passes - is_inside, self._first_epoch

    def miss_passes(self, num_passes: int, first_epoch: int, *, is_trained: bool) -> None:
        """Skip the passes that the others have finished; their script began them at ``first_epoch``."""
        self._note_start()
        self.is_trained = is_trained
        ahead = self._first_epoch - first_epoch if num_passes else 0  # this script begins with a newer checkpoint
        self.num_passes, self._first_epoch = num_passes, first_epoch if num_passes else self._first_epoch
        self._num_missed = max(0, num_passes - ahead)

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        """Continue from another rank's position."""
        self.progress.epoch, self.is_trained = state["epoch"], bool(state["trained"])
        self.progress.is_loaded = True
        self._num_missed = 0  # of loops inside of others, whose batches were missed too
        self._is_restored = state["running"] is not None
        if self._is_restored:
            self.epoch_shared.restore(state["running"])

    def position_state(self) -> dict[str, Any]:
        """Return the epoch and, during one, its remaining samples."""
        membership = self.membership
        # Of replicas that train apart, only the training of this one is saved.
        state = self.shared_state(
            begins=False, returned=lambda rank: membership.trains_apart and not membership.is_with(rank)
        )
        return {**state, "needs": "accelerate launch --keep_replicas"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of ``state_dict``; raise like :meth:`check_state_dict`."""
        self.check_state_dict(state_dict)
        self.progress.leave()
        if "running" in state_dict:
            self.restore_shared(state_dict)
            return
        self.progress.epoch = int(state_dict["epoch"]) + (bool(state_dict.get("rounds")))
        self.progress.is_loaded = True

    def check_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Raise unless this loader can continue at the position of ``state_dict``.

        Raises:
            CheckpointError: a loader of another kind of run saved it in the middle of an epoch.
        """
        is_between = state_dict.get("_iterator_finished") or not state_dict.get("rounds")
        if "running" not in state_dict and not is_between:
            raise CheckpointError(
                "The checkpoint was saved in the middle of an epoch by a run without `accelerate launch "
                "--keep_replicas`, whose ranks don't share an epoch's samples as those with it do. Resume without it, "
                "or from a checkpoint between two epochs."
            )

    def _read(self, saved: SavedPosition | None) -> Generator[Delivery, None, None]:
        if type(self.batch_sampler) is not BatchSampler:
            raise PreparationError(
                "skip_first_batches() under `accelerate launch --keep_replicas`: the living ranks share the rest "
                "of an epoch, so a rank's position isn't a number of batches. Leave it out, or --keep_replicas."
            )
        if not self.membership.members:  # no model was prepared yet; that makes ranks known to each other
            self.membership.exchange("members")
        if not self._is_restored:
            size, drop_last = self.epoch_shared.batch_size, self._drop_last
            self.epoch_shared = SharedEpoch(size, self._draw_order(), drop_last=drop_last)
        self._is_restored = self.has_backward = False
        self.num_passes += 1
        self.began = next(_passes)
        return self._deliver(self.epoch_shared)

    def _deliver(self, epoch: SharedEpoch) -> Generator[Delivery, None, None]:
        membership, num_steps, plan = self.membership, 0, self.plan(None)
        while self._has_step(epoch):
            readers, num_returns = membership.readers, epoch.num_returns
            reader = membership.reader_of(membership.rank)
            sampler = _Shares(epoch.copy(), readers, reader)
            # Not from the global stream: a resumed run, or one that lost ranks, begins the rest of an epoch once more.
            own = torch.Generator().manual_seed(zlib.crc32(repr(reader).encode(), epoch.checksum))
            for batch in self.torch_loader(self.dataset, self.collate_fn, batch_sampler=sampler, generator=own):
                indices, self.num_own_samples = own_share(epoch.draw(readers), reader)
                num_steps += 1
                is_last = not epoch.has_step(readers)
                info = BatchInfo(indices, None, is_last, num_steps, num_steps, num_steps, indices)
                yield plan.place(batch), info
                if self._gathered is not None and not self.has_backward:
                    epoch.commit(self._gathered)
                self._gathered = None
                if membership.readers != readers or epoch.num_returns != num_returns:
                    break  # the samples read ahead now belong to another rank

    def _has_step(self, epoch: SharedEpoch) -> bool:
        """Return whether the epoch has another step; replicas that train apart first agree on who has trained."""
        membership = self.membership
        if not epoch.has_step(membership.readers) and membership.trains_apart and self.has_backward and epoch.has_open:
            membership.exchange_apart("the end of an epoch", None, self)
        return epoch.has_step(membership.readers)

    def _draw_order(self) -> list[int]:
        batches: Any = self.batch_sampler
        sampler = batches.sampler
        if isinstance(sampler, SequentialSampler):
            return list(sampler)
        if self.data_seed is not None:
            seed = self.data_seed + self.progress.epoch
        else:
            own = int(torch.empty((), dtype=torch.int64).random_())
            seeds = self.membership.exchange("the beginning of an epoch", own).values
            seed = seeds[min(seeds)]
        with _streams_from(seed, sampler):
            return [int(index) for index in sampler]

    def _known_remainder(self) -> int:
        return -1

    def __len__(self) -> int:
        """Return the number of steps in an epoch without lost ranks."""
        size = self.epoch_shared.batch_size * max(1, len(self.membership.readers) or self.num_launched)
        sampler: Any = self.batch_sampler
        num_samples = len(sampler.sampler)
        return num_samples // size if self._drop_last else -(-num_samples // size)

    num_launched = 1


_passes = itertools.count(1)


def running_loaders(state: GradientState) -> list[SharedLoader]:
    """Return the loaders with running loops; the pass of the first one began last."""
    running = [one for one in state.loaders.all() if isinstance(one, SharedLoader)]
    return sorted(running, key=lambda loader: -loader.began)


def position_of(loaders: Iterable[SharedLoader], num_steps: int) -> list[int]:
    """Return what has to be equal on all ranks: the optimizers' steps, each epoch's checksum and its samples left."""
    epochs = [loader.epoch_shared for loader in loaders]
    return [num_steps, *(value for epoch in epochs for value in (epoch.checksum, epoch.num_left))]


def record_update(loaders: Sequence[SharedLoader], positions: Mapping[int, Sequence[float]]) -> None:
    """Record an update with the samples of the ranks in ``positions``, each as of `position_of`.

    Raises:
        CollectiveError: ranks have made other steps, or read other samples.
    """
    numbers = {rank: len(given) // 2 for rank, given in positions.items()}
    if len(set(numbers.values())) > 1:
        raise CollectiveError(
            f"The ranks make an update inside of different numbers of loops over prepared loaders: {numbers} (rank: "
            "loops). Let all ranks make the same updates in the same loops."
        )
    steps = {rank: int(given[0]) for rank, given in positions.items()}
    if len(set(steps.values())) > 1:
        raise CollectiveError(
            f"The ranks have made different numbers of optimizer steps (by rank: {steps}), so they have different "
            "weights. Let all ranks call optimizer.step() in the same updates, also where one rank has a bad loss."
        )
    for number, loader in enumerate(loaders):
        start = 1 + 2 * number
        loader.commit({rank: (int(given[start]), int(given[start + 1])) for rank, given in positions.items()})


@contextmanager
def _streams_from(seed: int, sampler: Any) -> Iterator[None]:
    """Enter a context in which ``sampler`` draws from generators seeded with ``seed``."""
    before = getattr(sampler, "generator", None)
    with host_streams(capture_host_streams()):
        torch.default_generator.manual_seed(seed)  # the devices' generators don't change
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if before is not None:
            sampler.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            if before is not None:
                sampler.generator = before


def shared_loader(
    dataloader: DataLoader[object],
    membership: Membership,
    size: int,
    refused: Mapping[str, object],
    data_seed: int | None,
    **arguments: Any,
) -> SharedLoader:
    """Return a loader over the same data, with samples divided among the living ones of ``size`` ranks.

    Raises:
        PreparationError: an option in ``refused`` was set, or the loader can't be divided like this.
    """
    asked = [name for name, value in refused.items() if value]
    if isinstance(dataloader.dataset, IterableDataset):
        asked.append("a dataset that is a stream")
    elif type(dataloader.batch_sampler) is not BatchSampler:
        asked.append(f"the batch sampler {type(dataloader.batch_sampler).__name__}")
    if dataloader.persistent_workers:
        asked.append("persistent_workers=True")
    if asked:
        raise PreparationError(
            f"{', '.join(asked)} under `accelerate launch --keep_replicas`: when a rank is lost, the rest of an "
            "epoch is shared anew, which needs datasets read by index in batches of one size. Leave that out, or "
            "--keep_replicas."
        )
    sampling = {"batch_sampler": dataloader.batch_sampler}
    prepared = SharedLoader(dataloader.dataset, membership, data_seed, **sampling, **arguments)
    prepared.num_launched = size
    return prepared
