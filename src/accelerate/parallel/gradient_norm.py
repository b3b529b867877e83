"""Global norm and clipping of sharded gradients.

Each rank computes the norm of its own shards, and a small all-reduce over the mesh axes that shard the gradient makes
it global. Gradients are first grouped by placement (sharded over different meshes, replicated, plain), because a sum
over an axis that replicates a gradient would count it several times.

A shard's norm is computed in the shard's dtype, at least float32. Norms are combined in float64 if the device has it,
on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ..devices.table import widest_float
from ..torch_private.modules import norm_of_each, scale_each

#: The process groups over which a gradient is sharded; empty: it is replicated on every rank.
Axes = tuple[Any, ...]
AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def shard_and_groups(gradient: torch.Tensor) -> tuple[torch.Tensor, Axes]:
    """Return this rank's shard of ``gradient``, and the groups over which it is sharded."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    gradient, mesh = _without_partial(gradient), gradient.device_mesh
    axes = (axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.to_local(), tuple(map(mesh.get_group, axes))


def reduce_partial_gradient(parameter: torch.Tensor) -> None:
    """Sum the gradient of ``parameter`` over the ranks that have parts of the sum; a collective."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and (reduced := _without_partial(gradient)) is not gradient:
        parameter.grad = reduced


def _without_partial(gradient: DTensor) -> DTensor:
    """Return ``gradient`` with its partial placements reduced, or itself if it has none."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=placements)


def total_norm(
    found: Iterable[tuple[torch.Tensor, Axes]], norm_type: float, device: torch.device, known: Sequence[Axes] = ()
) -> torch.Tensor:
    """Return the norm of all gradients together on every rank; a collective of the groups in ``found`` and ``known``.

    Args:
        found: shards and their groups, as :func:`shard_and_groups` returns them.
        device: the device on which this process communicates.
        known: groups that take part even where this rank has no shard.
    """
    groups: dict[Axes, list[torch.Tensor]] = {axes: [] for axes in known}
    for shard, axes in found:
        groups.setdefault(axes, []).append(shard)
    is_extreme = abs(norm_type) == float("inf")
    extreme = torch.maximum if norm_type > 0 else torch.minimum
    together = dist.ReduceOp.SUM if not is_extreme else dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    total = _of_nothing(norm_type, device)
    for axes, tensors in groups.items():
        own = _norm(tensors, norm_type, device)
        part = own if is_extreme else own.pow(norm_type)
        for group in axes:
            dist.all_reduce(part, together, group)
        total = extreme(total, part) if is_extreme else total + part
    return total if is_extreme else total.pow(1.0 / norm_type)


def _of_nothing(norm_type: float, device: torch.device) -> torch.Tensor:
    return torch.full(
        (), float("inf") if norm_type == -float("inf") else 0.0, dtype=widest_float(device), device=device
    )


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of this rank's tensors."""
    norms = [
        norm.to(device, widest_float(device))
        for (_, dtype), same in by_device_and_dtype(tensor for tensor in tensors if tensor.numel()).items()
        for norm in norm_of_each(same, norm_type, torch.promote_types(dtype, torch.float32))
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else _of_nothing(norm_type, device)


def by_device_and_dtype(tensors: Iterable[AnyTensor]) -> dict[tuple[torch.device, torch.dtype], list[AnyTensor]]:
    """Return ``tensors`` by device and dtype, each in the given order."""
    found: dict[tuple[torch.device, torch.dtype], list[AnyTensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


def norm_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the dtype of a norm of the gradients of ``parameters``: their widest dtype, at least float32."""
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, (parameter if parameter.grad is None else parameter.grad).dtype)
    return dtype


def scale_to(
    tensors: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, error_if_nonfinite: bool = False
) -> None:
    """Scale the shards ``tensors`` in place so that the full gradients' norm, now ``norm``, is at most ``max_norm``."""
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of the gradients is {norm.item()}, so they can't be clipped to {max_norm}. Look for the "
            "first loss that isn't finite, or leave error_if_nonfinite out."
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (device, dtype), same in by_device_and_dtype(tensors).items():
        scale_each(same, factor.to(device, torch.promote_types(dtype, torch.float32)))


def clip_sharded_grad_norm(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, nonfinite: bool, device: torch.device
) -> torch.Tensor:
    """Scale gradients, plain or sharded, to a global norm of at most ``max_norm``; return the earlier norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(map(shard_and_groups, gradients), norm_type, device).to(norm_dtype(parameters))
    scale_to(list(map(local_tensor, gradients)), norm, max_norm, nonfinite)
    return norm


def clip_sharded_grad_value(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Clamp the gradients of ``parameters``, plain or sharded, to [-``clip_value``, ``clip_value``]."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for parameter in chosen:
        reduce_partial_gradient(parameter)  # partial values aren't the gradient's elements
        if parameter.grad is not None:
            local_tensor(parameter.grad).clamp_(-clip_value, clip_value)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, or a plain tensor itself, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
