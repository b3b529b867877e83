"""Global norm and clipping of sharded gradients.

Each rank takes the norm of its own shards; one small reduction over exactly the mesh axes along which a gradient
is sharded makes it global. Gradients with different placements (sharded over different meshes, replicated, plain) are
grouped first, because a sum over an axis along which a gradient is replicated would count it several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from ..torch_private.modules import norm_of_each, scale_each

#: The process groups over which a gradient is sharded; empty: it is replicated on every rank.
Axes = tuple[Any, ...]


def shard_and_groups(gradient: torch.Tensor) -> tuple[torch.Tensor, Axes]:
    """Return this rank's shard of ``gradient``, and the groups over which it is sharded."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    mesh, placements = gradient.device_mesh, gradient.placements
    if any(isinstance(placement, Partial) for placement in placements):
        reduced = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
        gradient = gradient.redistribute(placements=reduced)
        placements = gradient.placements
    axes = tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())
    return gradient.to_local(), axes


def total_norm(
    found: Iterable[tuple[torch.Tensor, Axes]], norm_type: float, device: torch.device, known: Sequence[Axes] = ()
) -> torch.Tensor:
    """Return the norm of all gradients together, on every rank; a collective of the groups in ``found`` and ``known``.

    Args:
        found: shards and their groups, as :func:`shard_and_groups` returns them.
        device: where this process communicates.
        known: groups that take part even where this rank has no shard.
    """
    groups: dict[Axes, list[torch.Tensor]] = {axes: [] for axes in known}
    for shard, axes in found:
        groups.setdefault(axes, []).append(shard)
    infinite = norm_type == float("inf")
    total = torch.zeros((), device=device)
    for axes, tensors in groups.items():
        own = _norm(tensors, norm_type, device)
        part = own if infinite else own.pow(norm_type)
        for group in axes:
            dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group)
        total = torch.maximum(total, part) if infinite else total + part
    return total if infinite else total.pow(1.0 / norm_type)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of this rank's tensors, in float32."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [norm.to(device, torch.float32) for same in by_kind.values() for norm in norm_of_each(same, norm_type)]
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def scale_to(
    tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool = False
) -> None:
    """Scale ``tensors`` (shards) in place so that the full gradients, of norm ``norm``, have at most ``max_norm``."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of the gradients is {norm.item()}, so they can't be clipped to {max_norm}. Look for the "
            "first loss that isn't finite, or leave error_if_nonfinite out."
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), same in by_kind.items():
        scale_each(same, factor.to(device))


def clip_sharded_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float,
    device: torch.device,
    nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients, plain or sharded, to a global norm of at most ``max_norm``; return the norm before."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    norm = total_norm(map(shard_and_groups, gradients), float(norm_type), device)
    scale_to(list(map(local_tensor, gradients)), norm, max_norm, nonfinite)
    return norm


def clip_sharded_grad_value(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Clamp the gradients of ``parameters``, plain or sharded, to [-``clip_value``, ``clip_value``]."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for gradient in [local_tensor(parameter.grad) for parameter in chosen if parameter.grad is not None]:
        gradient.clamp_(-clip_value, clip_value)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor`` (all of a plain one), sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
