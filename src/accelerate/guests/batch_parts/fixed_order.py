"""Sums in a fixed order: of an update's parts in one binary tree, and of a tensor's elements by halving.

The parts 0 to P - 1 are the leaves of the tree. A node covers 2^k parts and starts at a multiple of 2^k; it is the sum
of its two halves. Nodes that are left over at the end, if P isn't a power of two, are summed from the last to the
first. So the tree depends on P only, and floating-point sums come out the same for any division of the parts among
ranks. The order of a sum by halving depends neither on how the tensor is sharded, nor on threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import torch
from torch import distributed as dist

#: A gradient of each parameter; None if the part didn't use the parameter.
Gradients: TypeAlias = list[torch.Tensor | None]


@final
@dataclass
class Node:
    """The sum over the parts ``start`` to ``start + size - 1``."""

    start: int
    size: int
    sums: Gradients

    def is_left_of(self, other: Node) -> bool:
        """Return whether this node and ``other`` are the halves of one node."""
        return self.size == other.size and self.start + self.size == other.start and not self.start % (2 * self.size)

    def joined(self, other: Node, *, in_place: bool) -> Node:
        """Return the sum of this node and the one to its right, in the tensors of this one or in new ones."""
        sums: Gradients = []
        for own, added in zip(self.sums, other.sums, strict=True):
            if own is None or added is None:
                sums.append(added if own is None else own)
            else:
                sums.append(own.add_(added) if in_place else own + added)
        return Node(self.start, self.size + other.size, sums)


@final
class PartialSums:
    """The sums of some parts, joined as far as the tree allows: log2(P) nodes and one for P consecutive parts."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = [*nodes]

    def add(self, node: Node, *, in_place: bool = True) -> None:
        """Add the next node to the right; with ``in_place``, to the tensors of those before."""
        self.nodes.append(node)
        while len(self.nodes) > 1 and self.nodes[-2].is_left_of(self.nodes[-1]):
            self._join_last(in_place)

    def total(self, *, in_place: bool = True) -> Gradients:
        """Return the sum of all parts; this object must have got all of them."""
        while len(self.nodes) > 1:
            self._join_last(in_place)
        return self.nodes[0].sums

    def _join_last(self, in_place: bool) -> None:
        last = self.nodes.pop()
        self.nodes.append(self.nodes.pop().joined(last, in_place=in_place))


def nodes_of(parts: Iterable[int]) -> list[tuple[int, int]]:
    """Return (start, size) of the nodes to which ``parts``, in rising order, are joined."""
    sums = PartialSums()
    for part in parts:
        sums.add(Node(part, 1, []))
    return [(node.start, node.size) for node in sums.nodes]


# --------------------------------------------------------------------------------------------------
# Sums of elements

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
