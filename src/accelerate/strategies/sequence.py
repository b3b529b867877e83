"""Ulysses sequence parallelism: for attention, ranks trade parts of the sequence for heads.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Needs no DeepSpeed.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.autograd import Function

from ..errors import PreparationError
from .ring import WHOLE_ATTENTION, Attention, Ring, as_many_heads, refuse_mask


@final
class _Traded(Function):
    """``tensor``, cut along one dimension instead of along the other."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ring: Ring, given: int, taken: int) -> torch.Tensor:
        ctx.rest = ring, given, taken
        return _traded(tensor, ring, given, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ring, given, taken = ctx.rest
        return _traded(gradients[0], ring, taken, given), None, None, None


def _traded(tensor: torch.Tensor, ring: Ring, given: int, taken: int) -> torch.Tensor:
    parts = torch.stack(tensor.chunk(ring.size, given))
    return torch.cat(ring.swapped(parts).unbind(0), taken)


def over_heads(ring: Ring) -> Attention:
    """Attention of some of the heads over whole sequences."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        refuse_mask(attn_mask)
        if query.shape[-3] % ring.size:
            raise PreparationError(
                f"sp_size={ring.size} deals attention heads to ranks, and doesn't divide this model's "
                f"{query.shape[-3]} heads. Choose another size, or context parallelism (cp_size), which needs no heads."
            )
        if key.shape[-3] % ring.size:
            key, value, enable_gqa = as_many_heads(key, query), as_many_heads(value, query), False
        heads: list[Any] = [_Traded.apply(tensor, ring, -3, -2) for tensor in (query, key, value)]
        mixed = WHOLE_ATTENTION(*heads, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        places: Any = _Traded.apply(mixed, ring, -2, -3)
        return places

    return attention
