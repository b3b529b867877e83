"""Sums whose order doesn't depend on how a tensor is sharded, nor on threads: by halving, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import distributed as dist

#: The mesh axis over which layers are sharded inside of a data-parallel rank.
_INNER_AXIS = "tp"


@final
class Place(NamedTuple):
    """The rows that this rank holds of a tensor, or of its tensor-parallel shard.

    Attributes:
        first: the first row of this rank.
        num_rows: the rows of the shard or tensor.
        axis: the mesh axis over which its rows are sharded; None if they aren't.
        inner: the mesh axis of tensor parallelism, if that shards the tensor.
    """

    first: int
    num_rows: int
    axis: int | None = None
    inner: int | None = None


def place_of(tensor: torch.Tensor) -> Place | None:
    """Return the rows that this rank holds of ``tensor``; None if a rank has no whole rows."""
    from torch.distributed.tensor import DTensor

    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return Place(0, num_rows)
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    sharded = {axis: placement for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()}
    inner = next((axis for axis in sharded if names[axis : axis + 1] == (_INNER_AXIS,)), None)
    dimension = None if inner is None else getattr(sharded.pop(inner), "dim", None)
    if len(sharded) > 1 or any(getattr(placement, "dim", None) != 0 for placement in sharded.values()):
        return None
    if inner is not None and dimension == 0:
        num_rows = _chunk(num_rows, mesh.size(inner), mesh.get_local_rank(inner))[1]
    axis = next(iter(sharded), None)
    first = 0 if axis is None else _chunk(num_rows, mesh.size(axis), mesh.get_local_rank(axis))[0]
    return Place(first, num_rows, axis, inner)


def _chunk(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a rank, as torch divides them."""
    size = -(-num_rows // num_ranks)
    first = min(rank * size, num_rows)
    return first, min(size, num_rows - first)


def halved_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension of ``values`` [rows, columns] or [columns].

    The second half is added to the first until one column is left. An addition of two tensors has no order that a
    kernel could choose, and no row depends on the others.
    """
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    while values.shape[-1] > 1:
        half = (values.shape[-1] + 1) // 2
        first, second = values[..., :half], values[..., half:]
        values = first.clone()
        values[..., : second.shape[-1]] += second
    return values[..., 0]


def row_sums(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return for each row of dimension 0 the sum of the absolute values to the power of ``norm_type``; [rows]."""
    rows = tensor.detach().reshape(tensor.shape[0], -1) if tensor.numel() else tensor.new_zeros(tensor.shape[0], 0)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return halved_sum(rows.square() if norm_type == 2 else rows.abs().pow(norm_type))


def total_norm(
    shards: Sequence[torch.Tensor],
    norm_type: float,
    places: Sequence[Place] | None = None,
    group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients together, in a fixed order; a collective if there are ``places``.

    Args:
        shards: this rank's rows of each gradient; at least one gradient.
        places: which rows those are; None if all gradients are whole.
        group: the process group over which rows are sharded.
        inner_group: that of tensor parallelism, if there is one.
    """
    device = shards[0].device
    if norm_type == float("inf"):
        largest = [shard.detach().abs().max().to(device).float() for shard in shards if shard.numel()]
        found = torch.stack(largest).max() if largest else torch.zeros((), device=device)
        if places is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        if inner_group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, inner_group)
        return found
    sums = [row_sums(shard if shard.ndim else shard[None], norm_type).to(device) for shard in shards]
    if places is not None:
        whole = [own.new_zeros(place.num_rows) for own, place in zip(sums, places, strict=True)]
        for rows, own, place in zip(whole, sums, places, strict=True):
            rows[place.first : place.first + len(own)] = own
        flat = torch.cat(whole)
        dist.all_reduce(flat, group=group)  # each row is zero on all ranks but one
        sums = list(flat.split([len(rows) for rows in whole]))
    of_each = torch.stack([halved_sum(rows) for rows in sums])
    if inner_group is not None and places is not None:
        found = [torch.empty_like(of_each) for _ in range(dist.get_world_size(inner_group))]
        dist.all_gather(found, of_each, group=inner_group)
        is_inner = torch.tensor([place.inner is not None for place in places], device=device)
        of_each = torch.where(is_inner, halved_sum(torch.stack(found, dim=1)), of_each)
    return _root(halved_sum(of_each), norm_type)


def norm_of_norms(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients together from those of parts of them [parts], in a fixed order."""
    if norm_type == float("inf"):
        return norms.max()
    return _root(halved_sum(norms.square() if norm_type == 2 else norms.pow(norm_type)), norm_type)


def _root(total: torch.Tensor, norm_type: float) -> torch.Tensor:
    return total.sqrt() if norm_type == 2 else total.pow(1.0 / norm_type)
