"""A loader for which rank 0 reads the batches and sends them to the other ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sized
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch.utils.data import Dataset, IterableDataset

from ..distributed import collectives
from ..distributed.mesh import DataParallelRank
from ..distributed.random import broadcast_value
from ..distributed.world import World
from ..errors import PreparationError, WorldError
from ..nested import (
    concatenate,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    named_tensors,
    rebuild_mapping,
    recursively_apply,
    rows_of,
    send_to_device,
)
from .loader import PreparedLoader
from .random_streams import Moves, SharedDraws
from .reader import Delivery, Reader, ReadPlan
from .resume import SavedPosition
from .sampling import BEGINNING, BatchCoverage, BatchInfo, ResumePosition, unskipped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SliceFunction = Callable[..., object]


@final
@dataclass(frozen=True)
class Announcement:
    """Rank 0's message about a global batch: its batch info, and the structure of the tensors that follow.

    The other ranks get it without the state that only rank 0 needs.
    """

    structures: list[Any]  # one, to be sharded, or one per rank
    is_whole: bool
    batch_info: BatchInfo
    failure: Exception | None = None  # what rank 0 met instead of a global batch

    def __reduce__(self) -> tuple[object, ...]:
        failure = self.failure
        if failure is not None:  # its class may not be known to the other ranks
            text = f"{type(failure).__name__}: {failure}"
            failure = WorldError(f"Rank 0, which reads the data for all ranks, failed: {text}")
        batch_info = self.batch_info._replace(last_batch=None, own=None)
        return Announcement, (self.structures, self.is_whole, batch_info, failure)


class DataLoaderDispatcher(PreparedLoader):
    """A prepared loader for which rank 0 reads; every rank gets its shard of each global batch.

    A global batch is one batch per rank, or with ``split_batches`` one batch for all. If the batches' tensors have
    equal shapes, they are concatenated and split into equal parts; an incomplete last global batch is padded from the
    first batch of the epoch. Other batches (ragged shapes, objects that aren't tensors) are sent unchanged, one per
    rank.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        *,
        share: DataParallelRank | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn: SliceFunction | None = slice_fn
        self._dp_rank = share

    def dp_rank(self) -> DataParallelRank:
        """Return this rank's index among the data-parallel ranks, and their number."""
        if self._dp_rank is not None:
            return self._dp_rank
        world = self._world()
        return DataParallelRank(0, 1) if world is None else DataParallelRank(world.rank, world.size)

    @property
    def batches_per_step(self) -> int:
        """The number of the loader's batches that all ranks use in one step."""
        return 1 if self.split_batches else self.dp_rank().count

    @property
    def samples_per_batch(self) -> int:
        """The batch size of rank 0's loader."""
        return getattr(self.index_sampler, "batch_size", None) or self.batch_size or 1

    @property
    def total_batch_size(self) -> int:
        """The number of samples that all ranks use in one step."""
        return self.samples_per_batch * self.batches_per_step

    def __len__(self) -> int:
        if isinstance(self.dataset, IterableDataset):
            length, skipped = super().__len__() + self.skip_batches, self.skip_batches
        else:
            root, skipped = unskipped(self.index_sampler)
            length = len(cast("Sized", root))
        steps = length // self.batches_per_step
        if not self._drop_last and length % self.batches_per_step:
            steps += 1
        return max(steps - skipped, 0)

    # -- reading on rank 0 -----------------------------------------------------------------------------

    _prefetches_batches = False  # the ranks receive batches on the device already

    def plan(self, saved: SavedPosition | None) -> ReadPlan:
        """Return the plan of rank 0's pass; a stream's positions are counted in its own batches."""
        plan = super().plan(saved)
        if isinstance(self.dataset, IterableDataset):
            saved = None if saved is None else replace(saved, position=_as_read_by_one(saved.position), dp_size=1)
            plan = replace(plan, saved=saved, num_skipped=plan.num_skipped * self.batches_per_step)
        return replace(plan, num_first_batches=self.batches_per_step, is_only_reader=True)

    def agreeing_world(self, order: object) -> None:
        """Return None, because only rank 0 draws."""

    def _num_read(self, batch_info: BatchInfo) -> int:
        return batch_info.batches

    def _position_after(self, num_batches: int) -> ResumePosition:
        return ResumePosition(num_batches // self.batches_per_step, num_batches, num_batches * self.samples_per_batch)

    def dp_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.dp_rank().count

    def _own_index(self) -> int:
        return self.dp_rank().index

    def start_position(self, skipped: int, saved: SavedPosition | None) -> ResumePosition:
        """Return the start position of rank 0's pass, counted in its own batches."""
        if skipped:
            return _as_read_by_one(self._position_after(skipped * self.batches_per_step))
        return BEGINNING if saved is None else _as_read_by_one(saved.position)

    def _read(self, saved: SavedPosition | None) -> Generator[Delivery, None, None]:
        world = self._world()
        self._synchronize()
        if world is not None and self.device is None:
            self.device: torch.device = world.device
        if world is not None and not world.is_main:
            return self._scatter(world, None)
        num_steps = super().plan(saved).num_skipped
        if saved is not None and not num_steps:
            num_steps = saved.position_for(self.dp_rank().count, self.total_batch_size).steps
        return self._scatter(world, GlobalBatches(self, self.open_reader(saved), num_steps))

    def _scatter(self, world: World | None, global_batches: GlobalBatches | None) -> Generator[Delivery, None, None]:
        dp_rank = self.dp_rank()
        draws = None if world is None else SharedDraws([self.generator, self.order().generator])
        try:
            while True:
                before = draws.capture() if draws is not None and global_batches is not None else {}
                announcement, batches = global_batches.next_batch() if global_batches is not None else (None, [])
                if world is not None and draws is not None:
                    message = broadcast_value((announcement, draws.moves_since(before)), world)
                    if global_batches is None:
                        announcement, moves = cast("tuple[Announcement | None, Moves]", message)
                        draws.follow(moves)
                if announcement is None:
                    return
                if announcement.failure is not None:
                    raise announcement.failure
                if world is not None:
                    batches = _broadcast(batches, announcement.structures, self.device, world)
                batch_info = announcement.batch_info
                if batch_info.is_last and not self._drop_last and batch_info.coverage is not None:
                    self.remainder: int = batch_info.coverage.num_samples
                yield self._part(batches, announcement, dp_rank), batch_info
                if batch_info.is_last:
                    return
        finally:
            if global_batches is not None:
                global_batches.source.close()

    def _part(self, batches: list[object], announcement: Announcement, dp_rank: DataParallelRank) -> object:
        coverage = announcement.batch_info.coverage
        if not announcement.is_whole or coverage is None:
            return batches[dp_rank.index if len(batches) > 1 else 0]
        size = coverage.size[dp_rank.index]
        cut = slice(dp_rank.index * size, (dp_rank.index + 1) * size)
        if self.slice_fn is not None:
            return self.slice_fn(batches[0], cut, process_index=dp_rank.index, num_processes=dp_rank.count)
        return rows_of(batches[0], sum(coverage.size), cut)


def _as_read_by_one(position: ResumePosition) -> ResumePosition:
    """Return the position as rank 0 counts it, one batch of the loader per step."""
    return replace(position, steps=position.batches)


def _broadcast(batches: list[object], structures: list[object], device: torch.device, world: World) -> list[object]:
    """Broadcast the tensors of rank 0's batches; the structures have the other values already."""
    if not world.is_main:
        batches = [send_to_device(initialize_tensors(structure), device) for structure in structures]
    return [
        recursively_apply(
            lambda tensor: collectives.broadcast(tensor, from_process=0, world=world, same_shapes=True), batch
        )
        for batch in batches
    ]


# -- concatenating, padding and splitting batches ----------------------------------------------------------


def _form(batch: object) -> tuple[str, list[object]] | None:
    """Return the properties that batches must share to be concatenated; None if this batch can't be."""
    leaves: list[object] = []

    def note(leaf: object) -> object:
        leaves.append((leaf.dtype, leaf.shape[1:]) if isinstance(leaf, torch.Tensor) and leaf.ndim else None)
        return None

    structure = recursively_apply(note, batch, test_type=lambda leaf: True)
    sizes = {leaf.shape[0] for _, leaf in named_tensors(batch) if leaf.ndim}
    return None if None in leaves or len(sizes) != 1 else (repr(structure), leaves)


def _cut_joined(batches: list[object], num_rows: int) -> object:
    """Return the first ``num_rows`` rows of those ``batches`` that have the first one's inner shapes."""
    fitting = [batch for batch in batches if _inner_shapes(batch) == _inner_shapes(batches[0])]
    whole = _joined(fitting)
    return rows_of(whole, _num_rows(whole) or 0, slice(0, num_rows))


def _inner_shapes(batch: object) -> list[torch.Size]:
    return [tensor.shape[1:] for _, tensor in named_tensors(batch)]


def _num_rows(batch: object) -> int | None:
    """Return the number of samples of a batch: the rows of its first tensor, or the length of its first plain list."""
    size = ignorant_find_batch_size(batch)
    if size is not None:
        return size
    if isinstance(batch, Mapping):
        sizes = [_num_rows(item) for item in cast("Mapping[Any, Any]", batch).values()]
        return next((size for size in sizes if size is not None), None)
    return len(cast("list[Any]", batch)) if isinstance(batch, list) else None


def _joined(pieces: list[Any]) -> object:
    """Concatenate the tensors and plain lists of batches with the same structure."""
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces) if first.ndim else first
    if isinstance(first, Mapping):
        mapping = cast("Mapping[Any, Any]", first)
        return rebuild_mapping(mapping, {key: _joined([piece[key] for piece in pieces]) for key in mapping})
    if isinstance(first, (list, tuple)):
        if not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in first):
            return honor_type(first, chain.from_iterable(pieces))
        return honor_type(first, (_joined([piece[i] for piece in pieces]) for i in range(len(first))))
    return first


@final
class GlobalBatches:
    """Rank 0's global batches with their batch info, made of the batches that it reads."""

    def __init__(self, loader: DataLoaderDispatcher, reader: Reader, num_steps: int) -> None:
        self.loader = loader
        self.reader = reader
        self.source: Generator[Delivery, None, None] = reader.read()
        self.count: int = loader.dp_rank().count
        self.num_steps: int = num_steps
        self._first: list[Any] = []
        self._began_later = num_steps > 0
        # Map-style datasets pad with rows that are read again, with the random streams of that step. A resumed pass
        # doesn't have the epoch's first rows, and random augmentation would differ.
        self._reads_again = self._began_later or not isinstance(loader.dataset, IterableDataset)
        self._held: list[Delivery] | None = None

    def next_batch(self) -> tuple[Announcement | None, list[object]]:
        """Return the announcement (or failure) and the batches of the next global batch; None after the last."""
        try:
            read = self._read_next()
            return self._assemble(read) if read else (None, [])
        except Exception as failure:  # the other ranks wait for the announcement, so any failure is sent to them
            nothing = BatchInfo(None, None, True, 0, 0, 0, None)
            return Announcement([], False, nothing, failure), []

    def _read_next(self) -> list[Delivery]:
        """Read the batches of the next global batch; with ``drop_last``, read one more ahead to detect the last."""
        size = self.loader.batches_per_step
        if not self.loader.drops_last or size == 1:
            return list(islice(self.source, size))
        read = list(islice(self.source, size)) if self._held is None else self._held
        if len(read) < size:
            return []
        if not read[-1][1].is_last:
            self._held = list(islice(self.source, size))
            if len(self._held) < size:
                batch, batch_info = read[-1]
                read[-1] = (batch, batch_info._replace(is_last=True))
        return read

    def _assemble(self, read: list[Delivery]) -> tuple[Announcement, list[object]]:
        batches, batch_info = [batch for batch, _ in read], read[-1][1]
        self.num_steps += 1
        whole = self._whole(batches)
        if whole is not None:
            num_rows = _num_rows(whole)
            if num_rows is not None:
                whole, coverage = self._padded(whole, num_rows)
                return self._announce([whole], True, batch_info, coverage)
            return self._announce([whole], True, batch_info, None)
        if len(batches) < self.count and self._reads_again:
            self._first = self.reader.first_batches(self.count - len(batches), sys.maxsize)
        self._first = self._first or batches
        sizes = [_num_rows(batch) or 1 for batch in batches]
        added = [self._first[number % len(self._first)] for number in range(self.count - len(batches))]
        valid = tuple(sizes + [0] * len(added))
        size = tuple(sizes + [_num_rows(batch) or 1 for batch in added])
        return self._announce(batches + added, False, batch_info, BatchCoverage(valid, size))

    def _announce(
        self, batches: list[object], is_whole: bool, batch_info: BatchInfo, coverage: BatchCoverage | None
    ) -> tuple[Announcement, list[object]]:
        batch_info = batch_info._replace(indices=None, coverage=coverage, steps=self.num_steps)
        return Announcement([get_data_structure(batch) for batch in batches], is_whole, batch_info), batches

    def _whole(self, batches: list[object]) -> object:
        """Concatenate the batches of a global batch, to be split; return None if their shapes differ."""
        if self.loader.split_batches:
            return batches[0]
        forms = [_form(batch) for batch in batches]
        if forms[0] is not None and forms.count(forms[0]) == len(forms):
            return concatenate(batches) if len(batches) > 1 else batches[0]
        if self.loader.slice_fn is not None:
            raise PreparationError(
                "slice_fn_for_dispatch cuts a global batch of joined batches, but these can't be joined: tensors must "
                "have equal shapes behind the first dimension. Use dispatch_batches=False, split_batches=True, or "
                "leave slice_fn_for_dispatch out, which sends such batches one per process."
            )
        return None

    def _padded(self, whole: object, num_rows: int) -> tuple[object, BatchCoverage]:
        """Pad ``whole`` with rows of the first global batch, so that every rank gets the same number."""
        count = self.count
        size = -(-num_rows // count)
        missing = size * count - num_rows
        # Keep nothing that can be read again: a slice keeps the memory of the whole batch until the epoch ends.
        if not self._first and (missing or not self._reads_again):
            self._first = [rows_of(whole, num_rows, slice(0, count))]
        if missing:
            if self._reads_again and (first_batches := self.reader.first_batches(sys.maxsize, count)):
                self._first = [_cut_joined(first_batches, count)]
            first = self._first[0]
            if _inner_shapes(first) != _inner_shapes(whole):  # inner shapes differ: only its own rows fit
                first = rows_of(whole, num_rows, slice(0, count))
            num_first = min(_num_rows(first) or 1, count)
            pieces = [whole]
            while missing:
                added = min(missing, num_first)
                pieces.append(rows_of(first, num_first, slice(0, added)))
                missing -= added
            whole = _joined(pieces)
        valid = tuple(min(max(num_rows - rank * size, 0), size) for rank in range(count))
        return whole, BatchCoverage(valid, (size,) * count)
