"""The same structure from several ranks, joined leaf by leaf: tensors and arrays along the rows, lists end to end.

Nothing here communicates: every rank that joins the same parts has the same result, or raises the same error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, cast, final

import numpy as np
import torch

from .data_loader.coverage import BatchCoverage, rows_to_keep
from .errors import CollectiveError
from .nested import honor_type, rebuild_mapping

_ARRAYS: Final = (torch.Tensor, np.ndarray)


def is_dataclass_instance(data: object) -> bool:
    """True for an instance of a dataclass, not for the class."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_of_tensors(data: Any) -> bool:
    """Whether every leaf of lists, tuples, mappings and dataclasses is a tensor, and there is one."""
    if isinstance(data, torch.Tensor):
        return True
    leaves = [*_leaves(data)]
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def tensors_of(data: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``data``, in order."""
    return [leaf for leaf in _leaves(data) if isinstance(leaf, torch.Tensor)]


def with_tensors(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """``data`` with ``tensors``, in order, in place of those that it holds."""
    rest = iter(tensors)

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return next(rest)
        children = children_of(item)
        return item if children is None else _rebuilt(item, [walk(child) for child in children])

    return walk(data)


def children_of(data: Any) -> list[Any] | None:
    """What a container holds; None for a leaf."""
    if isinstance(data, Mapping):  # before dataclasses: the outputs of transformers are both
        return list(cast("Mapping[Any, Any]", data).values())
    if isinstance(data, (tuple, list)):
        return list(cast("list[Any]", data))
    if is_dataclass_instance(data):
        return [getattr(data, field.name, None) for field in dataclasses.fields(data)]
    return None


def _rebuilt(data: Any, children: Sequence[Any]) -> Any:
    if isinstance(data, Mapping):
        mapping = cast("Mapping[Any, Any]", data)
        return rebuild_mapping(mapping, dict(zip(mapping, children, strict=True)))
    if isinstance(data, (tuple, list)):
        return honor_type(data, children)
    twin = copy.copy(data)  # __init__ may ask for more, or for less, than the fields
    for field, child in zip(dataclasses.fields(data), children, strict=True):
        object.__setattr__(twin, field.name, child)  # frozen ones too
    return twin


def _leaves(data: Any) -> Iterable[Any]:
    children = children_of(data)
    return [data] if children is None else chain.from_iterable(map(_leaves, children))


@final
class Joiner:
    """Joins what ranks computed from their batches, without the rows that complete a batch.

    Args:
        coverage_of: from what this rank gave (a tensor, a list) to the account of the batch that it belongs to.
        own: which of the parts is this rank's.
        as_objects: the items of every list are objects, one per sample, also where they are, or hold, tensors.
        keep: what stays of a tensor that was joined from pieces of so many rows, by an account.
    """

    def __init__(
        self,
        coverage_of: Callable[[Any], BatchCoverage | None],
        own: int,
        *,
        as_objects: bool = False,
        keep: Callable[[torch.Tensor, Sequence[int], BatchCoverage | None], torch.Tensor] | None = None,
    ) -> None:
        self._coverage_of, self._own, self._as_objects, self._keep = coverage_of, own, as_objects, keep or kept

    def join(self, parts: Sequence[Any]) -> Any:
        """One structure from those of all ranks, in the order of the ranks.

        A list without tensors in it, or whose items are records of one type, holds one object per sample; other
        containers are gone through. A mapping that has other keys on every rank is one of samples by their name. A
        single object becomes a list with one for each rank that has a real sample; None on every rank stays None.

        Raises:
            CollectiveError: tensors whose shapes differ behind the first dimension.
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

    def _column(self, parts: Sequence[list[Any]]) -> list[Any]:
        items = list(chain.from_iterable(parts))
        spans = rows_to_keep([len(part) for part in parts], self._coverage_of(parts[self._own]))
        return items if spans is None else [item for span in spans for item in items[span]]

    def _objects(self, parts: Sequence[Any]) -> Any:
        if all(part is None for part in parts):
            return None
        if all(isinstance(part, Iterable) and not isinstance(part, (str, bytes, Mapping)) for part in parts):
            return self._column([list(part) for part in parts])  # sets, ranges, ...: as `gather_object` has it
        coverage = self._coverage_of(parts[self._own])
        real = (1,) * len(parts) if coverage is None else coverage.real
        return [part for part, num_real in zip(parts, real, strict=True) if num_real]

    def _mappings(self, parts: Sequence[Mapping[Any, Any]]) -> Any:
        first = parts[0]
        if all(part.keys() == first.keys() for part in parts):
            return rebuild_mapping(first, {key: self.join([part[key] for part in parts]) for key in first})
        found: dict[Any, Any] = {}
        for key, value in self._column([list(part.items()) for part in parts]):
            found.setdefault(key, value)
        return rebuild_mapping(first, found)

    # -- what a list is --------------------------------------------------------------------------------

    def _is_column(self, parts: Sequence[list[Any]]) -> bool:
        """Whether a list holds one object per sample, and not a few columns of them; on all ranks alike."""
        coverage = self._coverage_of(parts[self._own])
        sizes = (None,) * len(parts) if coverage is None else coverage.size
        return self._as_objects or any(map(_holds_objects, parts, sizes))


def _holds_objects(items: list[Any], size: int | None) -> bool:
    """Whether the list of a rank that has ``size`` samples (None: who knows) holds an object for each of them."""
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


def kept(joined: torch.Tensor, rows: Sequence[int], coverage: BatchCoverage | None) -> torch.Tensor:
    """``joined``, from pieces of so many ``rows``, without those that complete a batch."""
    spans = rows_to_keep(rows, coverage)
    if spans is None:
        return joined
    pieces = [joined[span] for span in spans if span.stop > span.start]
    return torch.cat(pieces) if pieces else joined[:0]
