"""The true norm of gradients that lie in pieces over the ranks.

Each rank takes the norm of its own pieces; one small reduction over exactly the mesh axes along which a gradient
is cut makes it global. Gradients that lie differently (sharded over different meshes, replicated, plain) are grouped
first, because a sum over an axis along which a gradient is whole would count it several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from ..torch_private.optim import norm_of_each, scale_each

#: The process groups over which a gradient is cut; empty: every rank has the whole.
Axes = tuple[Any, ...]


def pieces(gradient: torch.Tensor) -> tuple[torch.Tensor, Axes]:
    """This rank's piece of ``gradient``, and the groups over which it is cut."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    mesh, placements = gradient.device_mesh, gradient.placements
    if any(isinstance(placement, Partial) for placement in placements):
        whole = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
        gradient = gradient.redistribute(placements=whole)
        placements = gradient.placements
    axes = tuple(mesh.get_group(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())
    return gradient.to_local(), axes


def total_norm(
    found: Iterable[tuple[torch.Tensor, Axes]], norm_type: float, device: torch.device, known: Sequence[Axes] = ()
) -> torch.Tensor:
    """The norm of all gradients together, on every rank; a collective of the groups in ``found`` and ``known``.

    Args:
        found: pieces and their groups, as :func:`pieces` gives them.
        device: where this process communicates.
        known: groups that take part even where this rank has no piece.
    """
    groups: dict[Axes, list[torch.Tensor]] = {axes: [] for axes in known}
    for piece, axes in found:
        groups.setdefault(axes, []).append(piece)
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
    """The norm of this rank's tensors, in float32."""
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
    """``tensors`` (pieces, in place) are scaled down so that the whole, of norm ``norm``, has at most ``max_norm``."""
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


def clip_pieces(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float,
    device: torch.device,
    nonfinite: bool,
) -> torch.Tensor:
    """The gradients of ``parameters``, plain or in pieces, have a norm of at most ``max_norm``; returns what it was."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
    norm = total_norm(map(pieces, gradients), float(norm_type), device)
    scale_to(list(map(own_piece, gradients)), norm, max_norm, nonfinite)
    return norm


def clamp_pieces(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """No element of the gradients of ``parameters``, plain or in pieces, is larger than ``clip_value`` in size."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for gradient in [own_piece(parameter.grad) for parameter in chosen if parameter.grad is not None]:
        gradient.clamp_(-clip_value, clip_value)


def own_piece(tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` lies on this rank; changing it changes ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
