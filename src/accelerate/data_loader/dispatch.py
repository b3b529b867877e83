"""A loader whose batches are read by rank 0 and dealt to the others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, cast, final

import torch
from torch.utils.data import IterableDataset

from accelerate import collectives
from accelerate.errors import PreparationError, WorldError
from accelerate.mesh import DataShare
from accelerate.nested import (
    concatenate,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    recursively_apply,
    send_to_device,
)
from accelerate.seeding import capture_host_streams, from_main, host_streams
from accelerate.world import World

from .coverage import BatchCoverage
from .order import Drawn, Place, unskipped
from .position import Restored
from .prefetch import BatchFeeder, Delivery
from .shared_draws import Moves, SharedDraws

SliceFunction = Callable[..., Any]


@final
@dataclass(frozen=True)
class Announcement:
    """What rank 0 tells the others about a round: the account of it, and the form of the tensors that follow."""

    structures: list[Any]  # one, to be cut, or one per share
    is_whole: bool
    drawn: Drawn
    failure: str | None = None


class DataLoaderDispatcher(BatchFeeder):
    """A prepared loader of which rank 0 reads the batches; every rank gets its part of each round.

    A round is one batch per rank, or with ``split_batches`` one batch for all. Batches of tensors that fit together
    are joined and cut into equal parts, an incomplete last round being completed from the first batch of the epoch.
    Other batches (ragged shapes, objects that aren't tensors) are dealt as they are, one per rank.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        share: DataShare | None = None,
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
        self._share = share

    def share(self) -> DataShare:
        """Which part of every round this rank gets."""
        if self._share is not None:
            return self._share
        world = self._world()
        return DataShare(0, 1) if world is None else DataShare(world.rank, world.size)

    @property
    def batches_per_round(self) -> int:
        """How many batches of the loader all ranks take at once."""
        return 1 if self.split_batches else self.share().count

    @property
    def samples_per_batch(self) -> int:
        """The size of the batches that rank 0 reads."""
        return getattr(self.index_sampler, "batch_size", None) or self.batch_size or 1

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks take at once."""
        return self.samples_per_batch * self.batches_per_round

    def __len__(self) -> int:
        if isinstance(self.dataset, IterableDataset):
            length, skipped = super().__len__() + self.skip_batches, self.skip_batches
        else:
            root, skipped = unskipped(self.index_sampler)
            length = len(root)
        rounds = length // self.batches_per_round
        if not self._drop_last and length % self.batches_per_round:
            rounds += 1
        return max(rounds - skipped, 0)

    # -- rank 0 alone draws and reads ------------------------------------------------------------------

    _draws_on_every_rank = False
    _stages_batches = False  # what the ranks get has come through the device already

    @property
    def _num_head(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.batches_per_round

    def head(self) -> list[Any]:
        """The first batches of the epoch, read again for a pass that began later."""
        if self._stream is not None:
            return [self.place_batch(batch) for batch in self._stream.head()]
        with host_streams(capture_host_streams()):  # reading again doesn't move the streams on
            dataset, groups = cast("Any", self.dataset), self._head
            if self.sample_seed is not None:
                groups = self.sample_seed.keyed(groups, self.progress.epoch)
            if self.batch_sampler is None:
                return [self.place_batch(self.collate_fn(dataset[index])) for index in groups]
            return [self.place_batch(self.collate_fn([dataset[index] for index in group])) for group in groups]

    def agreeing_world(self, order: Any) -> None:
        """None: rank 0 alone draws."""
        return None

    def _num_read(self, drawn: Drawn) -> int:
        return drawn.groups

    def _place_after(self, num_batches: int) -> Place:
        return Place(num_batches // self.batches_per_round, num_batches, num_batches * self.samples_per_batch)

    def _shares(self) -> int:
        return self.share().count

    def _own_index(self) -> int:
        return self.share().index

    def entrance(self, root: Any, skipped: int, restored: Restored | None) -> Place:
        """Where the pass of the reading rank begins, in its own batches."""
        if skipped:
            groups = skipped * self.batches_per_round
            return Place(groups, groups, groups * self.samples_per_batch)
        place = Place() if restored is None else restored.place
        return Place(place.groups, place.groups, place.samples)

    def _read(self, restored: Restored | None) -> Generator[Delivery, None, None]:
        world = self._world()
        self._synchronize()
        if world is not None and self.device is None:
            self.device = world.device
        if world is not None and not world.is_main:
            return self._deal_rounds(world, None)
        if isinstance(self.dataset, IterableDataset):
            skipped = self.skip_batches
            source = self._read_stream(_as_read_by_one(restored), skipped * self.batches_per_round)
        else:
            _, skipped = unskipped(self.index_sampler)
            source = self.read_map(restored)
        if restored is not None and not skipped:
            skipped = restored.place_for(self.share().count, self.total_batch_size).rounds
        return self._deal_rounds(world, Rounds(self, source, skipped))

    def _deal_rounds(self, world: World | None, rounds: Rounds | None) -> Generator[Delivery, None, None]:
        share = self.share()
        draws = None if world is None else SharedDraws([self.generator, self.order().generator])
        try:
            while True:
                before = draws.capture() if draws is not None and rounds is not None else {}
                announced, batches = rounds.following() if rounds is not None else (None, [])
                if world is not None and draws is not None:
                    told = (announced, draws.moves_since(before))
                    announced, moves = cast("tuple[Announcement | None, Moves]", from_main(told, world))
                    if rounds is None:
                        draws.follow(moves)
                if announced is None:
                    return
                if announced.failure is not None:
                    _raise(announced.failure, rounds)
                if world is not None:
                    batches = _broadcast(batches, announced.structures, self.device, world)
                drawn = announced.drawn
                if drawn.is_last and not self._drop_last and drawn.coverage is not None:
                    self.remainder = drawn.coverage.num_samples
                if rounds is not None:
                    drawn = drawn._replace(last_group=rounds.last_group, own=rounds.own)
                yield self._part(batches, announced, share), drawn
                if drawn.is_last:
                    return
        finally:
            if rounds is not None:
                rounds.source.close()

    def _part(self, batches: list[Any], announced: Announcement, share: DataShare) -> Any:
        coverage = announced.drawn.coverage
        if not announced.is_whole or coverage is None:
            return batches[share.index if len(batches) > 1 else 0]
        size = coverage.size[share.index]
        cut = slice(share.index * size, (share.index + 1) * size)
        if self.slice_fn is not None:
            return self.slice_fn(batches[0], cut, process_index=share.index, num_processes=share.count)
        return _cut(batches[0], cut, sum(coverage.size))


def _raise(failure: str, rounds: Rounds | None) -> None:
    if rounds is not None and rounds.failure is not None:
        raise rounds.failure
    raise WorldError(f"Rank 0, which reads the data for all ranks, failed: {failure}")


def _as_read_by_one(restored: Restored | None) -> Restored | None:
    """The position as rank 0 sees it, which reads one batch of the loader at a time."""
    if restored is None:
        return None
    groups = restored.place.groups
    return replace(restored, place=Place(groups, groups, restored.place.samples), shares=1)


def _broadcast(batches: list[Any], structures: list[Any], device: Any, world: World) -> list[Any]:
    """The batches of rank 0 on every rank; what isn't a tensor has come with the structures."""
    if not world.is_main:
        batches = [send_to_device(initialize_tensors(structure), device) for structure in structures]
    return [
        recursively_apply(lambda tensor: collectives.broadcast(tensor, from_process=0, world=world), batch)
        for batch in batches
    ]


# -- batches that are joined, completed and cut ------------------------------------------------------------


def _form(batch: Any) -> Any:
    """What two batches have to share to be joined along their first dimension; None where one can't be joined."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append((leaf.dtype, leaf.shape[1:]) if isinstance(leaf, torch.Tensor) and leaf.ndim else None)
        return None

    structure = recursively_apply(note, batch, test_type=lambda leaf: True)
    sizes = {leaf.shape[0] for leaf in _tensors(batch) if leaf.ndim}
    return None if None in leaves or len(sizes) != 1 else (repr(structure), leaves)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    recursively_apply(found.append, batch)
    return found


def _cut_joined(batches: list[Any], num_rows: int) -> Any:
    """The first ``num_rows`` rows of ``batches``, as many of which are joined as fit together."""
    fitting = [batch for batch in batches if _inner_shapes(batch) == _inner_shapes(batches[0])]
    whole = _joined(fitting)
    return _cut(whole, slice(0, num_rows), _num_rows(whole) or 0)


def _inner_shapes(batch: Any) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in _tensors(batch)]


def _num_rows(batch: Any) -> int | None:
    """How many samples a batch holds: the rows of its first tensor, or the length of its first plain list."""
    size = ignorant_find_batch_size(batch)
    if size is not None:
        return size
    if isinstance(batch, Mapping):
        sizes = [_num_rows(item) for item in cast("Mapping[Any, Any]", batch).values()]
        return next((size for size in sizes if size is not None), None)
    return len(cast("list[Any]", batch)) if isinstance(batch, list) else None


def _cut(data: Any, cut: slice, num_rows: int) -> Any:
    """``data`` with tensors, and lists with one plain item per sample, cut along the samples."""
    if isinstance(data, torch.Tensor):
        return data[cut] if data.ndim and data.shape[0] == num_rows else data
    if isinstance(data, Mapping):
        mapping = cast("Mapping[Any, Any]", data)
        items = {key: _cut(item, cut, num_rows) for key, item in mapping.items()}
        return type(mapping)(items)  # pyright: ignore[reportCallIssue]
    if isinstance(data, (list, tuple)):
        items = cast("list[Any]", data)
        is_plain = not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in items)
        if is_plain and len(items) == num_rows:
            return items[cut]
        return honor_type(items, (_cut(item, cut, num_rows) for item in items))
    return data


def _joined(pieces: list[Any]) -> Any:
    """Pieces cut from batches of one form, tensors and plain lists joined."""
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces) if first.ndim else first
    if isinstance(first, Mapping):
        mapping = cast("Mapping[Any, Any]", first)
        items = {key: _joined([piece[key] for piece in pieces]) for key in mapping}
        return type(mapping)(items)  # pyright: ignore[reportCallIssue]
    if isinstance(first, (list, tuple)):
        if not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in first):
            return honor_type(first, chain.from_iterable(pieces))
        return honor_type(first, (_joined([piece[i] for piece in pieces]) for i in range(len(first))))
    return first


@final
class Rounds:
    """Rank 0's side: batches put together to rounds, and each round's account."""

    def __init__(self, loader: DataLoaderDispatcher, source: Generator[Delivery, None, None], num_rounds: int) -> None:
        self.loader = loader
        self.source = source
        self.count = loader.share().count
        self.num_rounds = num_rounds
        self.failure: BaseException | None = None
        self.last_group: Any = None
        self.own: Mapping[str, Any] | None = None
        self._first: list[Any] = []
        self._began_later = num_rounds > 0
        self._held: list[Delivery] | None = None

    def following(self) -> tuple[Announcement | None, list[Any]]:
        """The next round and its account; None behind the last one. What goes wrong is told to all ranks."""
        try:
            read = self._next_read()
            return self._round(read) if read else (None, [])
        except Exception as failure:  # the other ranks wait for this round, so they have to hear of any failure
            self.failure = failure
            nothing = Drawn(None, None, True, 0, 0, 0, None)
            return Announcement([], False, nothing, f"{type(failure).__name__}: {failure}"), []

    def _next_read(self) -> list[Delivery]:
        """The batches of the next round; with ``drop_last`` the round behind it is read too, to know the last."""
        size = self.loader.batches_per_round
        if not self.loader._drop_last or size == 1:
            return list(islice(self.source, size))
        read = list(islice(self.source, size)) if self._held is None else self._held
        if len(read) < size:
            return []
        if not read[-1][1].is_last:
            self._held = list(islice(self.source, size))
            if len(self._held) < size:
                batch, drawn = read[-1]
                read[-1] = (batch, drawn._replace(is_last=True))
        return read

    def _round(self, read: list[Delivery]) -> tuple[Announcement, list[Any]]:
        batches, drawn = [batch for batch, _ in read], read[-1][1]
        self.last_group, self.own = drawn.last_group, drawn.own
        self.num_rounds += 1
        whole = self._whole(batches)
        if whole is not None:
            num_rows = _num_rows(whole)
            if num_rows is not None:
                whole, coverage = self._completed(whole, num_rows)
                return self._announce([whole], True, drawn, coverage)
            return self._announce([whole], True, drawn, None)
        if len(batches) < self.count and self._began_later:
            self._first = self.loader.head()
        self._first = self._first or batches
        sizes = [_num_rows(batch) or 1 for batch in batches]
        added = [self._first[number % len(self._first)] for number in range(self.count - len(batches))]
        real = tuple(sizes + [0] * len(added))
        size = tuple(sizes + [_num_rows(batch) or 1 for batch in added])
        return self._announce(batches + added, False, drawn, BatchCoverage(real, size))

    def _announce(
        self, batches: list[Any], is_whole: bool, drawn: Drawn, coverage: BatchCoverage | None
    ) -> tuple[Announcement, list[Any]]:
        told = drawn._replace(indices=None, coverage=coverage, rounds=self.num_rounds, last_group=None, own=None)
        return Announcement([get_data_structure(batch) for batch in batches], is_whole, told), batches

    def _whole(self, batches: list[Any]) -> Any:
        """The batches of a round as one, to be cut; None where they don't fit together."""
        if self.loader.split_batches:
            return batches[0]
        forms = [_form(batch) for batch in batches]
        if forms[0] is not None and forms.count(forms[0]) == len(forms):
            return concatenate(batches) if len(batches) > 1 else batches[0]
        if self.loader.slice_fn is not None:
            raise PreparationError(
                "slice_fn_for_dispatch cuts the joined batches of a round, but these batches can't be joined: tensors "
                "must have equal shapes behind the first dimension. Use dispatch_batches=False, split_batches=True, "
                "or leave slice_fn_for_dispatch out, which deals such batches one per process."
            )
        return None

    def _completed(self, whole: Any, num_rows: int) -> tuple[Any, BatchCoverage]:
        """``whole`` with as many rows for every share; what is missing comes from the first round."""
        count = self.count
        if not self._first:
            self._first = [_cut(whole, slice(0, count), num_rows)]
        size = -(-num_rows // count)
        missing = size * count - num_rows
        if missing:
            if self._began_later and (head := self.loader.head()):
                self._first = [_cut_joined(head, count)]
            first = self._first[0]
            if _inner_shapes(first) != _inner_shapes(whole):  # padded batch by batch: only its own rows fit
                first = _cut(whole, slice(0, count), num_rows)
            num_first = min(_num_rows(first) or 1, count)
            pieces = [whole]
            while missing:
                added = min(missing, num_first)
                pieces.append(_cut(first, slice(0, added), num_first))
                missing -= added
            whole = _joined(pieces)
        real = tuple(min(max(num_rows - share * size, 0), size) for share in range(count))
        return whole, BatchCoverage(real, (size,) * count)
