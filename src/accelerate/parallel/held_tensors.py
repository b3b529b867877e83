"""The tensors of a model's state dict, each with the region that this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch

from ..errors import NotBuilt
from ..modules import is_sharded
from ..torch_private.distributed import shard_offset

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: (begin, end) in each dimension of a tensor; empty where begin is end.
Region: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor distributed over the ranks, and this rank's part of it.

    Attributes:
        names: the names in the user's own model; tied parameters have several.
        local: the values of ``region``, without gradient; None if this rank holds nothing.
        region: this rank's part; with ``strides``, a part of the tensor flattened in memory order.
        strides: the strides of the whole tensor, if a flat parameter holds it in memory order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor | None
    region: Region | None
    strides: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Region:
        """The region that covers the whole tensor."""
        return tuple((0, size) for size in (self.shape if self.strides is None else (self.num_elements,)))

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for the whole."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)

    def part_of(self, whole: torch.Tensor, region: Region) -> torch.Tensor:
        """Return a view of ``region`` of ``whole``."""
        if self.strides is not None:
            whole = whole.as_strided((self.num_elements,), (1,))
        return part_of(whole, region)


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a view of ``region`` of ``whole``."""
    return whole[tuple(slice(begin, end) for begin, end in region)]


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of ``region``."""
    return tuple(end - begin for begin, end in region)


def size_of(region: Region) -> int:
    """Return the number of elements of ``region``."""
    return math.prod(shape_of(region))


def region_of(tensor: DTensor) -> Region | None:
    """Return the region of this rank's shard of ``tensor``; None if the shard isn't a single region."""
    shape, offset = shard_offset(tensor)
    if tuple(tensor.to_local().shape) != shape:
        return None
    return tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def buckets(sizes: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Iterate over the indices of ``sizes`` in runs whose sum is at most ``limit``; a larger size is a run alone."""
    held, run = 0, list[int]()
    for position, size in enumerate(sizes):
        if run and held + size > limit:
            yield run
            held, run = 0, []
        run.append(position)
        held += size
    if run:
        yield run


def held_tensors(state: Mapping[str, object]) -> list[HeldTensor]:
    """Return the tensors of a state dict with live tensors; other ranks hold those on the meta device."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [_held(tuple(names[key]), tensor.detach()) for key, tensor in tensors.items()]


def _held(names: tuple[str, ...], tensor: torch.Tensor) -> HeldTensor:
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        return HeldTensor(names, shape, tensor.dtype, None, None)
    if not is_sharded(tensor):
        return HeldTensor(names, shape, tensor.dtype, tensor, tuple((0, size) for size in shape))
    sharded = cast("DTensor", tensor)
    if sharded.device_mesh.get_coordinate() is None:
        return HeldTensor(names, shape, tensor.dtype, None, None)
    local: Any = sharded.to_local()
    if callable(getattr(local, "wait", None)):  # the result of a pending collective
        local = local.wait()
    region = region_of(sharded)
    if region is None:
        raise NotBuilt(
            f"{names[0]!r} of shape {list(shape)} is sharded as {sharded.placements}, and this rank's shard of "
            f"shape {list(local.shape)} is no single region: it can't be streamed. Use get_state_dict()."
        )
    return HeldTensor(names, shape, tensor.dtype, local, region if size_of(region) else None)
