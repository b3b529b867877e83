"""Gather or sum the results of an evaluation over all ranks, each sample once."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar, cast, final
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..devices.table import widest_float
from ..distributed import collectives
from ..distributed.collectives import reduce
from ..distributed.mesh import DATA_AXES, TOKEN_AXES, Mesh
from ..distributed.world import World
from ..errors import CollectiveError, PreparationError, UnequalTensors
from ..logging import MultiProcessAdapter, get_logger
from ..nested import get_shape, honor_type, rebuild_mapping
from ..training.accumulation import GradientState, RunningLoader
from .sampling import BatchCoverage, rows_to_keep

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

logger: MultiProcessAdapter = get_logger(__name__)


class AssumedLoaderWarning(UserWarning):
    """Values were gathered while several loaders were running, and could belong to any of them."""


@final
class MetricGather:
    """The ``gather_for_metrics`` of one Accelerator: all ranks' results of the current batch, each sample once."""

    def __init__(self, mesh: Mesh, gradient_state: GradientState) -> None:
        self._mesh, self._gradient_state = mesh, gradient_state
        self._histories: WeakKeyDictionary[Any, _RowHistory] = WeakKeyDictionary()

    def gather(self, data: object, *, as_objects: bool, to_main: bool) -> object:
        """Gather ``data`` of all ranks and concatenate it leaf by leaf, without padding rows.

        Tensors of equal shapes are gathered directly; everything else (objects, batches of different sizes) is pickled.
        With ``to_main``, the other ranks get None.
        """
        readers = self._mesh.within(*DATA_AXES)  # each rank gathers from its counterparts in other replicas
        is_receiver = not to_main or self._mesh.world.is_main
        loader, coverages = loader_of(data, self._gradient_state, is_main=self._mesh.world.is_main)
        coverage: BatchCoverage | None = getattr(loader, "coverage", None)
        is_plain = not as_objects and is_of_tensors(data)
        if readers.members is not None:
            return readers.members.gather_for_metrics(data, loader, as_objects, is_receiver)
        keep = self._padding_remover(loader, coverage)
        if readers.size == 1:
            if not is_plain and not isinstance(data, torch.Tensor):
                return data
            tensors = tensors_of(data)
            rows = [[len(tensor)] if tensor.ndim else [1] for tensor in tensors]
            return with_tensors(data, map(keep, tensors, rows, [coverage] * len(tensors)))
        tensors, joined = tensors_of(data) if is_plain else [], None
        is_even = is_plain and not (coverage is not None and coverage.is_uneven)
        if is_even:
            try:
                joined = collectives.gather(tensors, world=readers, to=0 if to_main else None, like=data)
            except UnequalTensors:  # raised on every rank: some ranks left out rows, or have other containers
                is_even = False
        if not is_even:
            return self._joined(data, readers, coverages, coverage, keep, as_objects, is_receiver)
        if joined is None or not is_receiver:
            return None
        rows = [[len(tensor) if tensor.ndim else 1] * readers.size for tensor in tensors]
        covered = [coverages.get(id(tensor), coverage) for tensor in tensors]
        return with_tensors(data, map(keep, joined, rows, covered))

    def pad(self, tensor: T, dim: int, pad_index: float, *, pad_first: bool) -> T:
        """Pad ``tensor`` along ``dim`` to the largest size of any rank that has a batch in this step."""
        coverage: BatchCoverage | None = getattr(self._gradient_state.loaders.active, "coverage", None)
        world, num_present = self._mesh.world, None
        if coverage is not None and coverage.num_absent:  # the other ranks' loops are over: they don't call it
            world = self._mesh.within(*DATA_AXES)
            num_present = world.size - coverage.num_absent
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first, world=world, num_present=num_present)

    def _joined(
        self,
        data: object,
        readers: World,
        coverages: dict[int, BatchCoverage | None],
        coverage: BatchCoverage | None,
        keep: _PaddingRemover,
        as_objects: bool,
        is_receiver: bool,
    ) -> object:
        tensors = tensors_of(data)
        on_host = with_tensors(data, [tensor.detach().cpu() for tensor in tensors])
        num_absent = 0 if coverage is None else coverage.num_absent
        if num_absent:
            logger.warning_once(
                "gather_for_metrics(): in the last step, no batch is left for rank %d and those after it. "
                "What is gathered in it reaches the other ranks, the main process among them. For the same metric on "
                "every rank, gather once after the loop, or leave even_batches on.",
                readers.size - num_absent,
            )
        parts = (
            collectives.exchange_objects(on_host, readers.size - num_absent, world=readers)
            if num_absent
            else collectives.gather_object([on_host], world=readers)
        )
        if not is_receiver:
            return None
        parts[readers.rank] = data  # the original objects, whose ids identify their loader

        def coverage_of(own: object) -> BatchCoverage | None:
            found = coverages.get(id(own), coverage)
            return None if found is None else found.of_present()

        joined = Joiner(coverage_of, readers.rank, as_objects=as_objects, keep=keep).join(parts)
        if not tensors:
            return joined
        return with_tensors(joined, [tensor.to(tensors[0].device) for tensor in tensors_of(joined)])

    def _padding_remover(self, loader: RunningLoader | None, coverage: BatchCoverage | None) -> _PaddingRemover:
        is_equal = coverage is not None and getattr(loader, "planned_batches", None) is None
        nominal = getattr(loader, "total_batch_size", None) if is_equal else None
        if loader is None or nominal is None or coverage is None:
            return _PaddingRemover(None, 0, is_short=False)
        history = self._histories.setdefault(loader, _RowHistory())
        history.next_call(getattr(getattr(loader, "progress", None), "batch_info", None))
        nominal //= len(coverage.size)
        return _PaddingRemover(history, nominal, is_short=loader.end_of_dataloader and max(coverage.size) < nominal)


# -- repeated means ----------------------------------------------------------------------------------------


@final
class _RowHistory:
    """The numbers of rows of tensors in a loader's full batches, by call in the batch and position in the call."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], int] = {}
        self.call = 0
        self._batch_info: Any = None

    def next_call(self, batch_info: object) -> None:
        """Count a call that gathers values of the batch ``batch_info``."""
        self.call = self.call + 1 if batch_info is self._batch_info else 0
        self._batch_info = batch_info


@final
class _PaddingRemover:
    """A function object that removes padding rows from the tensors of a call, one after the other.

    Some loops repeat a mean once per row of a full batch (the Trainer of transformers does). For a shorter last batch
    it is kept once per valid row, so averages over all rows are averages over samples. Such a mean is recognised by its
    number of rows, which is the same as in full batches, never by its values.
    """

    def __init__(self, history: _RowHistory | None, nominal: int, *, is_short: bool) -> None:
        self._history, self._nominal, self._is_short = history, nominal, is_short
        self._index = -1

    def __call__(self, joined: torch.Tensor, rows: Sequence[int], coverage: BatchCoverage | None) -> torch.Tensor:
        self._index += 1
        if joined.ndim == 0:
            return joined
        if self._history is not None and coverage is not None and joined.ndim == 1 and joined.is_floating_point():
            copies = self._copies(rows, coverage, self._history)
            if copies:
                parts = zip(joined.split(rows[0]), coverage.valid, strict=True)
                return torch.cat([part[: valid * copies] for part, valid in parts])
        return without_padding(joined, rows, coverage)

    def _copies(self, rows: Sequence[int], coverage: BatchCoverage, history: _RowHistory) -> int:
        """Return how many rows per sample of a shorter batch repeat a mean; 0 if the rows aren't a repeated mean."""
        dp_size, nominal, number = len(coverage.size), self._nominal, rows[0]
        # If the ranks split one batch, the mean is repeated for the rows of the whole batch.
        if len(rows) != dp_size or rows.count(number) != dp_size or number not in (nominal, nominal * dp_size):
            return 0
        key = (history.call, self._index)
        if not self._is_short:
            history.rows[key] = number
            return 0
        before = history.rows.get(key)
        is_repeated = any(number % size for size in coverage.size if size) if before is None else before == number
        return number // nominal if is_repeated else 0


# -- the loader of gathered values -------------------------------------------------------------------------


def loader_of(
    data: object, gradient_state: GradientState, *, is_main: bool
) -> tuple[RunningLoader | None, dict[int, BatchCoverage | None]]:
    """Return the running loader that ``data`` was computed from, and the coverage of leaves of a batch, by id.

    If several loaders are running, the leaves of a batch belong to its loader. Other values are assigned to the loader
    whose batch is among them, else to the loader that yielded last.
    """
    if len(gradient_state.loaders.references) <= 1:
        return gradient_state.loaders.active, {}
    running = gradient_state.loaders.all()
    parts = [*_parts(data)]
    owners = [_owner_of(part, running) for part in parts]
    owning = [loader for loader in running if any(owner is loader for owner in owners)]
    assumed = running[-1] if not owning or owning[-1] is running[-1] else owning[-1]
    coverages = {
        id(part): getattr(owner, "coverage", None)
        for part, owner in zip(parts, owners, strict=True)
        if owner is not None
    }
    has_derived = any(isinstance(part, torch.Tensor) and id(part) not in coverages for part in parts)
    if has_derived or not coverages:
        _warn_if_ambiguous(assumed, running, gradient_state, is_main=is_main)
    return assumed, coverages


def _parts(data: object) -> Iterator[object]:
    """Yield ``data``, its containers and its leaves."""
    yield data
    for child in children_of(data) or ():
        yield from _parts(child)


def _owner_of(part: object, running: Sequence[RunningLoader]) -> RunningLoader | None:
    """Return the only loader whose current batch has ``part``, or a tensor with the same memory; else None."""
    if not isinstance(part, (torch.Tensor, list, Mapping)):  # an equal number or string may be the same object
        return None
    held = [(loader, [*_parts(getattr(loader, "current_batch", None))]) for loader in running]
    found = [loader for loader, parts in held if any(part is one for one in parts)]
    if not found and isinstance(part, torch.Tensor):
        memory = _memory_of(part)
        found = [
            loader
            for loader, parts in held
            if memory and any(isinstance(one, torch.Tensor) and _memory_of(one) == memory for one in parts)
        ]
    return found[0] if len(found) == 1 else None


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _warn_if_ambiguous(
    assumed: object, running: Sequence[RunningLoader], gradient_state: GradientState, *, is_main: bool
) -> None:
    coverage = getattr(assumed, "coverage", None)
    others = [loader for loader in running if loader is not assumed]
    is_in_doubt = getattr(assumed, "is_interleaved", False) and any(
        getattr(other, "is_interleaved", False) and getattr(other, "coverage", None) != coverage for other in others
    )
    if not is_in_doubt or coverage is None or gradient_state.loaders.has_assumed_loader:
        return
    gradient_state.loaders.has_assumed_loader = True
    if is_main:
        warnings.warn(
            f"Several loaders deliver batches in turn, and values that are no part of a batch could belong to any of "
            f"them. They are taken for values of {_described(assumed)}, not of "
            f"{' or '.join(map(_described, others))}. Gather them together with a tensor of their batch "
            "(gather_for_metrics((outputs, batch['labels']))), or silence this with "
            "warnings.simplefilter('ignore', accelerate.data_loader.gathering.AssumedLoaderWarning).",
            AssumedLoaderWarning,
            stacklevel=5,
        )


def _described(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    try:
        length = f" of {loader.total_dataset_length} samples"
    except (AttributeError, TypeError):  # an iterable dataset, or another package's loader
        length = ""
    return f"the loader over {type(dataset).__name__}{length} (global batches of {loader.total_batch_size})"


# -- sums --------------------------------------------------------------------------------------------------


@final
class StreamingMean:
    """A running sum, count and mean over the samples of all ranks, each counted once.

    Padding rows in the last batch of a loader are left out. Sums are in float64 on the device (float32 if it has no
    float64). Ranks communicate only when a result is read.

        loss = accelerator.streaming_mean()
        for batch in evaluation_loader:
            loss.update(per_sample_losses)
        print(loss.mean())
    """

    def __init__(self, mesh: Mesh, gradient_state: GradientState) -> None:
        self._mesh, self._gradient_state = mesh, gradient_state
        self.reset()

    def reset(self) -> None:
        """Set the sums to zero."""
        device = self._mesh.world.device
        self._sums = torch.zeros(2, dtype=widest_float(device), device=device)

    def update(
        self, values: torch.Tensor | np.ndarray | Sequence[float] | float, weight: torch.Tensor | float | None = None
    ) -> None:
        """Add the samples of the current batch.

        Args:
            values: one number per sample, or several (the same number for all samples): shape ``[samples, ...]``. With
                ``weight``, a sum over the batch: a number, or a tensor of one element.
            weight: the number of items in the sum (tokens, for example). The sum must contain only valid rows, because
                padding can't be removed from it; the loader's ``own_rows`` gives their number.
        """
        values = torch.as_tensor(values, device=self._sums.device).detach()
        if weight is not None:
            total, count = values.sum(dtype=self._sums.dtype), weight
        else:
            values = self._valid_rows(values)
            # The ranks of one model replica all count the same samples.
            num_copies = self._mesh.size("cp", "sp")
            total, count = values.sum(dtype=self._sums.dtype) / num_copies, values.numel() / num_copies
        self._sums[0] += total
        self._sums[1] += count

    def _valid_rows(self, values: torch.Tensor) -> torch.Tensor:
        if values.ndim == 0:
            raise PreparationError(
                "StreamingMean.update() was given a single number. Give one value per sample, so that padded rows "
                "can be left out; or the sum over the batch, with weight=."
            )
        loader, _ = loader_of(values, self._gradient_state, is_main=self._mesh.world.is_main)
        own = getattr(loader, "own_rows", None)
        if own is None or own[0] == own[1] or values.shape[0] % own[1]:
            return values
        valid, size = own
        return values[: valid * (values.shape[0] // size)]

    def sum_and_count(self) -> tuple[float, float]:
        """Return the sum and the count over all ranks, on every rank; a collective."""
        total, count = reduce(self._sums, "sum", world=self._mesh.within(*TOKEN_AXES), same_shapes=True).tolist()
        return total, count

    def sum(self) -> float:
        """Return the sum over all ranks, on every rank; a collective."""
        return self.sum_and_count()[0]

    def mean(self) -> float:
        """Return the mean over all ranks, on every rank, NaN before any sample; a collective."""
        total, count = self.sum_and_count()
        return total / count if count else float("nan")


# --------------------------------------------------------------------------------------------------
# Concatenate structures of several ranks, leaf by leaf: tensors and arrays along the rows, lists end to end
#
# No communication: every rank that joins the same parts gets the same result, or raises the same error.

_ARRAYS: Final = (torch.Tensor, np.ndarray)


def is_dataclass_instance(data: object) -> TypeGuard[DataclassInstance]:
    """Return whether ``data`` is an instance of a dataclass, not the class."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_of_tensors(data: object) -> bool:
    """Return whether all leaves of lists, tuples, mappings and dataclasses are tensors, and there is at least one."""
    if isinstance(data, torch.Tensor):
        return True
    leaves = [*_leaves(data)]
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def tensors_of(data: object) -> list[torch.Tensor]:
    """Return the tensors among the leaves of ``data``, in order."""
    return [leaf for leaf in _leaves(data) if isinstance(leaf, torch.Tensor)]


def with_tensors(data: object, tensors: Iterable[torch.Tensor]) -> object:
    """Return ``data`` with its tensors replaced by ``tensors``, in order."""
    return _with_next(data, iter(tensors))


def _with_next(data: object, rest: Iterator[torch.Tensor]) -> object:
    if isinstance(data, torch.Tensor):
        return next(rest)
    children = children_of(data)
    return data if children is None else _rebuilt(data, [_with_next(child, rest) for child in children])


def children_of(data: object) -> list[object] | None:
    """Return the items of a container; None for a leaf."""
    if isinstance(data, Mapping):  # before dataclasses: the outputs of transformers are both
        return list(cast("Mapping[Any, Any]", data).values())
    if isinstance(data, (tuple, list)):
        return list(cast("list[Any]", data))
    if is_dataclass_instance(data):
        return [getattr(data, field.name, None) for field in dataclasses.fields(data)]
    return None


def _rebuilt(data: object, children: Sequence[object]) -> object:
    if isinstance(data, Mapping):
        mapping = cast("Mapping[Any, Any]", data)
        return rebuild_mapping(mapping, dict(zip(mapping, children, strict=True)))
    if isinstance(data, (tuple, list)):
        return honor_type(data, children)
    copied = copy.copy(data)  # __init__ may take other arguments than the fields
    for field, child in zip(dataclasses.fields(cast("DataclassInstance", data)), children, strict=True):
        object.__setattr__(copied, field.name, child)  # frozen ones too
    return copied


def _leaves(data: object) -> Iterable[object]:
    children = children_of(data)
    return [data] if children is None else chain.from_iterable(map(_leaves, children))


@final
class Joiner:
    """An object that concatenates the ranks' results without padding rows.

    Args:
        coverage_of: returns the coverage of the batch of a value of this rank (a tensor, a list).
        own: the index of this rank's part.
        as_objects: treat the items of every list as objects, one per sample, even if they are or contain tensors.
        keep: removes padding from a concatenated tensor, given the rows of its pieces and the coverage.
    """

    def __init__(
        self,
        coverage_of: Callable[[object], BatchCoverage | None],
        own: int,
        *,
        as_objects: bool = False,
        keep: Callable[[torch.Tensor, Sequence[int], BatchCoverage | None], torch.Tensor] | None = None,
    ) -> None:
        self._coverage_of, self._own, self._as_objects = coverage_of, own, as_objects
        self._keep = keep or without_padding

    def join(self, parts: Sequence[Any]) -> object:
        """Concatenate the structures of all ranks into one, in rank order.

        A list without tensors, or of records of one type, has one object per sample; other containers are traversed. A
        mapping with different keys on the ranks maps names to samples, and is merged. A single object becomes a list
        with one item per rank with a valid row; None on every rank stays None.

        Raises:
            CollectiveError: the tensors' shapes differ after the first dimension, or the containers of tensors alone.
        """
        first = parts[0]
        if any(type(part) is not type(first) for part in parts):
            return self._objects(parts)
        if isinstance(first, _ARRAYS):
            return self._arrays(parts)
        if isinstance(first, Mapping):
            return self._mappings(parts)
        if isinstance(first, list) and self._is_column(parts):
            return self._column(parts)
        children = [children_of(part) for part in parts]
        num_children = {None if child is None else len(child) for child in children}
        if None in num_children or len(num_children) > 1:
            return self._objects(parts)
        columns = zip(*cast("list[list[Any]]", children), strict=True)
        return _rebuilt(first, [self.join(column) for column in columns])

    # -- leaves ----------------------------------------------------------------------------------------

    def _arrays(self, parts: Sequence[Any]) -> Any:
        pieces = [part.reshape(1) if part.ndim == 0 else part for part in parts]
        if len({(tuple(piece.shape[1:]), piece.dtype) for piece in pieces}) > 1:
            if self._as_objects:
                return list(parts)
            raise CollectiveError(
                "gather_for_metrics(): the ranks' tensors can't be joined: "
                + ", ".join(f"{list(piece.shape)} {piece.dtype} on rank {rank}" for rank, piece in enumerate(pieces))
                + ". Pad them first (accelerator.pad_across_processes(tensor, dim=1)), or gather them as they are: "
                "gather_for_metrics([tensor], use_gather_object=True)."
            )
        rows, coverage = [len(piece) for piece in pieces], self._coverage_of(parts[self._own])
        if isinstance(pieces[0], torch.Tensor):
            return self._keep(torch.cat([piece.detach().cpu() for piece in pieces]), rows, coverage)
        joined, spans = np.concatenate(pieces), rows_to_keep(rows, coverage)
        return joined if spans is None else np.concatenate([joined[span] for span in spans])

    def _column(self, parts: Sequence[Sequence[T]]) -> list[T]:
        items = list(chain.from_iterable(parts))
        spans = rows_to_keep([len(part) for part in parts], self._coverage_of(parts[self._own]))
        return items if spans is None else [item for span in spans for item in items[span]]

    def _check_containers(self, parts: Sequence[object]) -> None:
        """Refuse other keys, lengths or kinds of containers on the ranks, if these hold nothing but tensors."""
        if not self._as_objects and all(map(is_of_tensors, parts)):
            given = ", ".join(f"{get_shape(part)} on rank {rank}" for rank, part in enumerate(parts))
            raise CollectiveError(
                f"gather_for_metrics(): the ranks' containers of tensors differ, so they can't be joined: {given}. "
                "Give the same containers and keys on all ranks, or gather them as they are: "
                "gather_for_metrics(..., use_gather_object=True)."
            )

    def _objects(self, parts: Sequence[object]) -> object:
        if not all(isinstance(part, list) for part in parts):  # lists of other lengths are joined end to end
            self._check_containers(parts)
        if all(part is None for part in parts):
            return None
        if all(isinstance(part, Iterable) and not isinstance(part, (str, bytes, Mapping)) for part in parts):
            return self._column(
                [list(part) for part in cast("Sequence[Iterable[object]]", parts)]
            )  # sets, ranges, ...: as `gather_object` does
        coverage = self._coverage_of(parts[self._own])
        valid = (1,) * len(parts) if coverage is None else coverage.valid
        return [part for part, num_valid in zip(parts, valid, strict=True) if num_valid]

    def _mappings(self, parts: Sequence[Mapping[Any, Any]]) -> object:
        first = parts[0]
        if all(part.keys() == first.keys() for part in parts):
            return rebuild_mapping(first, {key: self.join([part[key] for part in parts]) for key in first})
        self._check_containers(parts)
        found: dict[Any, Any] = {}
        for key, value in self._column([list(part.items()) for part in parts]):
            found.setdefault(key, value)
        return rebuild_mapping(first, found)

    # -- lists -----------------------------------------------------------------------------------------

    def _is_column(self, parts: Sequence[list[object]]) -> bool:
        """Return whether the list has one object per sample, and isn't a few columns; the same on all ranks."""
        coverage = self._coverage_of(parts[self._own])
        sizes = (None,) * len(parts) if coverage is None else coverage.size
        return self._as_objects or any(map(_holds_objects, parts, sizes))


def _holds_objects(items: list[Any], size: int | None) -> bool:
    """Return whether a rank's list has one object for each of its ``size`` samples (None: unknown)."""
    if not items:
        return True
    if not any(isinstance(leaf, _ARRAYS) for leaf in _leaves(items)):
        lengths = [len(item) if isinstance(item, list) else 0 for item in cast("list[Any]", items)]
        is_of_columns = bool(size) and all(lengths) and not any(length % size for length in lengths)
        return not is_of_columns or not len(items) % (size or 1)
    if len({type(item) for item in items}) > 1:
        return False
    if isinstance(items[0], _ARRAYS):  # one tensor per sample, of any shape; or a few, with one row per sample each
        return len(items) == size and any(not item.ndim or item.shape[0] % size for item in items)
    return True


def without_padding(joined: torch.Tensor, rows: Sequence[int], coverage: BatchCoverage | None) -> torch.Tensor:
    """Return ``joined``, which consists of one piece of ``rows`` rows per rank, without padding rows."""
    spans = rows_to_keep(rows, coverage)
    if spans is None:
        return joined
    pieces = [joined[span] for span in spans if span.stop > span.start]
    return torch.cat(pieces) if pieces else joined[:0]
