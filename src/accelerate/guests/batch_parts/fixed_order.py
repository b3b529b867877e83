"""Sums whose order doesn't depend on how a tensor is sharded, nor on threads: by halving, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: (first row of this rank's shard, number of rows of the whole tensor); None if the tensor is whole.
Rows = tuple[int, int]


def first_row(num_rows: int, mesh: DeviceMesh, axis: int) -> int:
    """Return the first row of this rank's shard of ``num_rows`` rows along ``axis`` of ``mesh``, as torch cuts them."""
    return min(mesh.get_local_rank(axis) * -(-num_rows // mesh.size(axis)), num_rows)


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
    places: Sequence[Rows] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of all gradients together, in a fixed order; a collective if there are ``places``.

    Args:
        shards: this rank's rows of each gradient; at least one gradient.
        places: which rows those are; None if all gradients are whole.
        group: the process group over which they are sharded.
    """
    device = shards[0].device
    if norm_type == float("inf"):
        largest = [shard.detach().abs().max().to(device).float() for shard in shards if shard.numel()]
        found = torch.stack(largest).max() if largest else torch.zeros((), device=device)
        if places is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found
    sums = [row_sums(shard if shard.ndim else shard[None], norm_type).to(device) for shard in shards]
    if places is not None:
        whole = [own.new_zeros(rows) for own, (_, rows) in zip(sums, places, strict=True)]
        for rows, own, (first, _) in zip(whole, sums, places, strict=True):
            rows[first : first + len(own)] = own
        flat = torch.cat(whole)
        dist.all_reduce(flat, group=group)  # each row is zero on all ranks but one
        sums = list(flat.split([len(rows) for rows in whole]))
    total = halved_sum(torch.stack([halved_sum(rows) for rows in sums]))
    return total.sqrt() if norm_type == 2 else total.pow(1.0 / norm_type)
