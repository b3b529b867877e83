"""Tensors in nested lists, tuples and dicts: map, measure, slice and concatenate them.

Containers keep their type: a namedtuple stays the same namedtuple, a ``BatchEncoding`` stays a ``BatchEncoding``.
These functions don't communicate.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast

import torch

from .errors import CollectiveError

Predicate = Callable[[object], bool]
T = TypeVar("T")
Key = TypeVar("Key")
Parameters = ParamSpec("Parameters")

#: A value that a JSON document holds.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor on another rank."""

    shape: torch.Size
    dtype: torch.dtype


def chained_operation(function: Callable[Parameters, T]) -> Callable[Parameters, T]:
    """Decorate `function` so that errors in its inner operations are reported under its own name."""

    @functools.wraps(function)
    def operation(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CollectiveError as error:
            name = f"accelerate.utils.operations.{function.__name__}"
            raise CollectiveError(f"Error found while calling `{name}`: {error}") from error

    return operation


def is_torch_tensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether ``tensor_info`` is a :class:`TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Return whether ``data`` is an instance of a namedtuple class (also ``typing.NamedTuple``)."""
    return isinstance(data, tuple) and isinstance(getattr(cast("Any", data), "_fields", None), tuple)


def honor_type(obj: Any, generator: Iterable[object]) -> Any:
    """Return the items of ``generator`` in a container of the type of ``obj``."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def rebuild_mapping(data: Mapping[Key, object], items: dict[Key, object]) -> Any:
    """Return ``items`` in a mapping of the type of ``data``."""
    if isinstance(data, defaultdict):
        return type(data)(data.default_factory, items)
    # A mapping with a constructor of its own (transformers' ModelOutput, BatchEncoding) takes a dict.
    return type(data)(items)  # pyright: ignore[reportCallIssue]


def recursively_apply(
    func: Callable[..., object],
    data: object,
    *args: object,
    test_type: Predicate = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Any:
    """Return ``data`` with every leaf that passes ``test_type`` replaced by ``func(leaf, *args, **kwargs)``.

    Raises:
        TypeError: there is a leaf of another type, and ``error_on_other_type`` is set.
    """

    # Not by a nested function that calls itself: such a cycle keeps its tensors alive until a garbage collection.
    options: dict[str, Any] = {"test_type": test_type, "error_on_other_type": error_on_other_type, **kwargs}
    if isinstance(data, (tuple, list)):
        return honor_type(data, (recursively_apply(func, item, *args, **options) for item in cast("list[Any]", data)))
    if isinstance(data, Mapping):
        mapping = cast("Mapping[object, object]", data)
        applied = {key: recursively_apply(func, item, *args, **options) for key, item in mapping.items()}
        return rebuild_mapping(mapping, applied)
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"Unsupported type {type(data)} passed to {getattr(func, '__name__', func)}: only nested "
            f"list/tuple/dicts of objects that satisfy {getattr(test_type, '__name__', test_type)} are handled."
        )
    return data


def flat_tensors(data: Any) -> list[torch.Tensor] | None:
    """Return the items of a plain dict, list or tuple that contains only tensors; None for any other object."""
    kind = cast("type[Any]", type(data))
    if kind is not dict and kind is not list and kind is not tuple:
        return None
    items: list[Any] = list(data.values() if kind is dict else data)
    for item in items:
        if not isinstance(item, torch.Tensor):
            return None
    return items


def named_tensors(data: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, each with its place, such as ``.inputs.0``; "" for a tensor itself."""
    if isinstance(data, torch.Tensor):
        yield name, data
    elif isinstance(data, Mapping):
        for key, item in cast("Mapping[object, object]", data).items():
            yield from named_tensors(item, f"{name}.{key}")
    elif isinstance(data, (list, tuple)):
        for number, item in enumerate(cast("list[object]", data)):
            yield from named_tensors(item, f"{name}.{number}")


def _children(data: object) -> list[object] | None:
    """Return the items of a container; None for a leaf."""
    if isinstance(data, Mapping):
        return list(cast("Mapping[object, object]", data).values())
    return list(cast("list[object]", data)) if isinstance(data, (tuple, list)) else None


def send_to_device(
    tensor: object,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Return ``tensor`` (any nested container) with every object that has ``.to`` moved to ``device``.

    ``skip_keys`` names entries of mappings that aren't moved.
    """
    if isinstance(tensor, torch.Tensor):  # first, because it is the hot path of the loaders
        return tensor.to(device, non_blocking=non_blocking)
    move = getattr(tensor, "to", None)
    if callable(move) and not isinstance(tensor, type) and not (skip_keys and isinstance(tensor, Mapping)):
        # Before the containers, because a PackedSequence or a BatchEncoding has its own `to`.
        return _move(move, device, non_blocking)
    if isinstance(tensor, (tuple, list)):
        items = cast("list[object]", tensor)
        return honor_type(items, (send_to_device(item, device, non_blocking, skip_keys) for item in items))
    if isinstance(tensor, Mapping):
        mapping = cast("Mapping[object, object]", tensor)
        skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
        moved = {
            key: item if key in skipped else send_to_device(item, device, non_blocking, skip_keys)
            for key, item in mapping.items()
        }
        return rebuild_mapping(mapping, moved)
    return tensor


def _move(move: Callable[..., object], device: torch.device | str | int, non_blocking: bool) -> object:
    try:
        return move(device, non_blocking=non_blocking)
    except TypeError:  # a batch type whose .to() knows no non_blocking
        return move(device)


def get_data_structure(data: object) -> Any:
    """Return ``data`` with every tensor replaced by a :class:`TensorInformation`."""

    def describe(tensor: torch.Tensor) -> TensorInformation:
        return TensorInformation(tensor.shape, tensor.dtype)

    return recursively_apply(describe, data)


def get_shape(data: object) -> Any:
    """Return ``data`` with every tensor replaced by its shape, as a list."""

    def shape(tensor: torch.Tensor) -> list[int]:
        return list(tensor.shape)

    return recursively_apply(shape, data)


def initialize_tensors(data_structure: object) -> Any:
    """Return empty tensors in a given structure of :class:`TensorInformation`."""

    def allocate(info: TensorInformation) -> torch.Tensor:
        return torch.empty(info.shape, dtype=info.dtype)

    return recursively_apply(allocate, data_structure, test_type=is_tensor_information)


def find_batch_size(data: object) -> int | None:
    """Return the first dimension of the first tensor in ``data``; None if it has no dimensions.

    Raises:
        TypeError: the first leaf is not a tensor.
    """
    children = _children(data)
    if children is not None:
        if not children:
            raise ValueError(f"Cannot find the batch size from an empty {type(data).__name__}.")
        return find_batch_size(children[0])
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0] if data.ndim else None


def ignorant_find_batch_size(data: object) -> int | None:
    """Return the batch size like :func:`find_batch_size`, but None if there is no tensor."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def listify(data: object) -> Any:
    """Return ``data`` with tensors converted to numbers and lists (bfloat16 by way of float32)."""

    def convert(tensor: torch.Tensor) -> object:
        tensor = tensor.detach().cpu()
        return cast("Any", tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(convert, data)


@chained_operation
def slice_tensors(
    data: object, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return ``data`` with every tensor indexed by ``tensor_slice`` in its first dimension.

    The last two arguments are for users' slice functions for dispatched loaders, which have the same signature.
    """
    return recursively_apply(itemgetter(tensor_slice), data)


def split_batch(batch: object, size: int, num_parts: int) -> Iterator[tuple[object, int]]:
    """Yield ``num_parts`` parts of nearly the same size, with their sizes.

    Tensors and lists with ``size`` entries are split; other objects are in every part.
    """
    edges = [size * number // num_parts for number in range(num_parts + 1)]
    for start, stop in pairwise(edges):
        yield (batch if num_parts == 1 else rows_of(batch, size, slice(start, stop))), stop - start


def rows_of(data: object, size: int, rows: slice) -> Any:
    """Return ``rows`` of the tensors, and lists of plain items, that have ``size`` entries; keep other objects."""
    if isinstance(data, torch.Tensor):
        return data[rows] if data.ndim and data.shape[0] == size else data
    if isinstance(data, (list, tuple)):
        items = cast("Sequence[object]", data)
        if len(items) == size and not any(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in items):
            return items[rows]
        return honor_type(data, (rows_of(item, size, rows) for item in items))
    if isinstance(data, Mapping):
        mapping = cast("Mapping[object, object]", data)
        cut = {key: rows_of(value, size, rows) for key, value in mapping.items()}
        return rebuild_mapping(mapping, cut)
    return data


@chained_operation
def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of several equal structures along ``dim``; return a single other leaf unchanged.

    Raises:
        TypeError: there are several leaves to join, and they aren't tensors.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        items = cast("list[object]", first)
        return honor_type(items, (concatenate([item[i] for item in data], dim) for i in range(len(items))))
    if isinstance(first, Mapping):
        mapping = cast("Mapping[object, object]", first)
        return rebuild_mapping(mapping, {key: concatenate([item[key] for item in data], dim) for key in mapping})
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"Can only concatenate tensors but got {type(first)}")
    return torch.cat(data, dim=dim)


def find_device(data: object) -> torch.device | None:
    """Return the device of the first tensor in ``data``; None if there is none."""
    children = _children(data)
    if children is None:
        return data.device if isinstance(data, torch.Tensor) else None
    return next((device for device in map(find_device, children) if device is not None), None)


_HALF_PRECISIONS: Final = (torch.float16, torch.bfloat16)


def convert_to_fp32(tensor: object) -> Any:
    """Return ``tensor`` (any nested container) with half-precision tensors cast to float32."""
    if isinstance(tensor, torch.Tensor):  # fast path: the output of most steps is one tensor
        return torch.Tensor.float(tensor) if tensor.dtype in _HALF_PRECISIONS else tensor
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half_precision)


def _is_half_precision(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype in _HALF_PRECISIONS


def pad_input_tensors(tensor: object, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row of every tensor until ``num_processes`` divides ``batch_size``."""

    def pad(item: torch.Tensor) -> torch.Tensor:
        missing = -batch_size % num_processes
        if missing == 0:
            return item
        last = item.narrow(dim, item.shape[dim] - 1, 1)
        return torch.cat([item, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)
