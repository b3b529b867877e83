"""Attention over a sequence that is cut over ranks: keys and values gathered, or going round.

* gathered: every rank has all keys and values for a moment (Llama 3 report, 2024).
* going round: partial results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers
  for Near-Infinite Context", 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, final

import torch
from torch import distributed as dist
from torch.autograd import Function
from torch.nn import functional

from ..errors import PreparationError
from ..torch_private.tracing import attention_on_cpu, attention_on_cpu_backward

Attention = Callable[..., torch.Tensor]

#: torch's own, whatever stands in its place while sequences are cut.
WHOLE_ATTENTION: Final[Attention] = functional.scaled_dot_product_attention


@final
class Ring:
    """The ranks over which a sequence is cut, in its order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def swapped(self, parts: torch.Tensor) -> torch.Tensor:
        """Of ``parts`` (one for each rank, in the first dimension), those that all ranks had for this one."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def passed_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the rank before has given, as soon as the second value has been waited for; ``tensor`` goes on."""
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sizes_out, sizes_in = [0] * self.size, [0] * self.size
        sizes_out[(self.rank + 1) % self.size] = sizes_in[(self.rank - 1) % self.size] = sent.numel()
        work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), sizes_in, sizes_out, group=self.group, async_op=True
        )
        return received, work


def refuse_mask(attn_mask: torch.Tensor | None) -> None:
    """Raises if there is a mask.

    Raises:
        PreparationError: there is one.
    """
    if attn_mask is not None:
        raise PreparationError(
            "Attention over a sequence that is cut over ranks takes no attn_mask: a rank's mask covers its own part "
            "only. Use is_causal=True or no mask; pad sequences on the right, and leave padding out of the labels."
        )


# -- keys and values gathered ------------------------------------------------------------------------------


@final
class _Gathered(Function):
    """The parts of all ranks, in the order of ranks; gradients are added up where a part came from."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ring: Ring) -> torch.Tensor:
        ctx.ring = ring
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ring.size)]
        dist.all_gather(parts, part.contiguous(), group=ring.group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ring.swapped(gradients[0]).sum(0), None


def over_gathered(ring: Ring) -> Attention:
    """Attention whose keys and values are those of all ranks."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        refuse_mask(attn_mask)
        gathered: Any = _Gathered.apply(torch.cat([key, value], -1), ring)
        keys, values = _in_order(gathered).split([key.shape[-1], value.shape[-1]], -1)
        if not is_causal:
            return WHOLE_ATTENTION(query, keys, values, None, dropout_p, False, **options)
        rows = query.shape[-2] // 2
        found: list[torch.Tensor] = []
        for own, piece in zip(query.split(rows, -2), (ring.rank, 2 * ring.size - 1 - ring.rank), strict=True):
            seen = (piece + 1) * rows
            mask = _causal(rows, seen, query.device)
            found.append(
                WHOLE_ATTENTION(own, keys[..., :seen, :], values[..., :seen, :], mask, dropout_p, False, **options)
            )
        return torch.cat(found, -2)

    return attention


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The whole sequence, from the two pieces of each rank (``[ranks, ..., places, features]``)."""
    front, back = parts.chunk(2, -2)
    return torch.cat([*front.unbind(0), *back.flip(0).unbind(0)], -2)


@lru_cache(maxsize=64)
def _causal(rows: int, seen: int, device: torch.device) -> torch.Tensor:
    """Which of ``seen`` places the last ``rows`` of them may look at."""
    return torch.ones(rows, seen, dtype=torch.bool, device=device).tril(seen - rows)


# -- keys and values go round ------------------------------------------------------------------------------


def _rows_of(ring: Ring, step: int, is_causal: bool, length: int) -> tuple[slice, slice, bool]:
    """Of the block that arrives at ``step``: which queries look at which keys, and whether causally."""
    everything = slice(0, length)
    if step == 0 or not is_causal:
        return everything, everything, is_causal
    # The front piece of an earlier rank lies before all queries, its back piece behind; of a later rank both pieces lie
    # between the two of the queries.
    came_from_before = step <= ring.rank
    return (
        (everything, slice(0, length // 2), False)
        if came_from_before
        else (slice(length // 2, length), everything, False)
    )


@final
class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, is_causal: bool, scale: Any
    ) -> torch.Tensor:
        length, width = query.shape[-2], key.shape[-1]
        block = torch.cat([key, value], -1)
        out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32, device=query.device)
        weight = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
        for step in range(ring.size):
            following, work = ring.passed_on(block) if step < ring.size - 1 else (block, None)
            rows, places, causal = _rows_of(ring, step, is_causal, length)
            part, part_weight = attention_on_cpu(
                query[..., rows, :],
                block[..., places, :width].contiguous(),
                block[..., places, width:].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            before = weight[..., rows]
            both = torch.logaddexp(before, part_weight)
            out[..., rows, :] *= (before - both).exp().unsqueeze(-1)
            out[..., rows, :] += part.float() * (part_weight - both).exp().unsqueeze(-1)
            weight[..., rows] = both
            if work is not None:
                work.wait()
            block = following
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.rest = ring, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, weight = ctx.saved_tensors
        ring, is_causal, scale = ctx.rest
        length, width = query.shape[-2], key.shape[-1]
        block = torch.cat([key, value], -1)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_block = torch.zeros_like(block, dtype=torch.float32)
        for step in range(ring.size):
            following, work = ring.passed_on(block) if step < ring.size - 1 else (block, None)
            rows, places, causal = _rows_of(ring, step, is_causal, length)
            found = attention_on_cpu_backward(
                gradients[0][..., rows, :].contiguous(),
                query[..., rows, :].contiguous(),
                block[..., places, :width].contiguous(),
                block[..., places, width:].contiguous(),
                out[..., rows, :].contiguous(),
                weight[..., rows].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            of_query[..., rows, :] += found[0]
            of_block[..., places, :width] += found[1]
            of_block[..., places, width:] += found[2]
            if work is not None:
                work.wait()
            block = following
            of_block, sent = ring.passed_on(of_block)  # as often as there are ranks: then it is at home
            sent.wait()
        of_key, of_value = of_block.split([width, value.shape[-1]], -1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def around_the_ring(ring: Ring) -> Attention:
    """Attention whose keys and values go from rank to rank."""

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
        if dropout_p:
            raise PreparationError(
                f"Attention with dropout {dropout_p} can't go round a ring of ranks. Use TorchContextParallelConfig("
                "cp_comm_strategy='allgather'), or attention without dropout."
            )
        if enable_gqa:
            key, value = as_many_heads(key, query), as_many_heads(value, query)
        query, key, value = _autocast(query, key, value)
        found: Any = _RingAttention.apply(query, key, value, ring, is_causal, scale)
        return found

    return attention


def as_many_heads(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` with each head repeated, so that it has as many as ``like``."""
    return tensor.repeat_interleave(like.shape[-3] // tensor.shape[-3], -3)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors`` as torch's own attention would take them under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)
