"""Context parallelism and Ulysses sequence parallelism: sequences sharded over ranks.

Inside :func:`split_sequences` the given tensors hold this rank's part of the sequence, but attention still sees full
sequences. All other layers of a transformer work on each position separately, and don't change.

On CUDA devices, context parallelism is torch's own. Torch shards only CUDA kernels, so other devices use the
implementation below. Ulysses works on all devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Final, final

import torch
from torch import distributed as dist
from torch.autograd import Function
from torch.nn import functional

from ..distributed.mesh import Mesh
from ..errors import PreparationError, SettingError
from ..hooks.attach import attach_context_parallel_hooks, refuse_recurrent_layers, refuse_windows
from ..plugins.parallelism import ParallelismConfig
from ..torch_private.distributed import set_ring_rotation
from ..torch_private.tracing import attention_on_cpu, attention_on_cpu_backward
from .compile import has_compiled_regions

_NAME: Final = "scaled_dot_product_attention"


def split_sequences(
    mesh: Mesh,
    config: ParallelismConfig,
    buffers: Sequence[torch.Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: set[torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """Enter a context in which ``buffers`` hold this rank's part of the sequence, and attention sees all of it.

    Args:
        buffers: all tensors with a sequence dimension: inputs, labels, positions, ...; restored after the block.
        buffer_seq_dims: the sequence dimension of each.
        no_restore_buffers: the buffers that need not be restored.

    Raises:
        SettingError: the arguments contradict each other, or the ranks don't divide a sequence.
    """
    tensors, dims, dropped = list(buffers or ()), list(buffer_seq_dims or ()), no_restore_buffers or set()
    if len(tensors) != len(dims):
        raise SettingError(
            f"`buffer_seq_dims` must have the same number of elements as `buffers`: got {len(dims)} and {len(tensors)}."
        )
    if any(not any(one is other for other in tensors) for one in dropped):
        raise SettingError("`no_restore_buffers` must be a subset of `buffers`.")
    axis = "cp" if mesh.active("cp") else "sp"
    num_parts = mesh.size(axis) * (2 if axis == "cp" else 1)
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor.shape[dim] % num_parts:
            raise SettingError(
                f"A buffer of shape {list(tensor.shape)} can't be split along dimension {dim}: {axis}_size="
                f"{mesh.size(axis)} takes sequences whose length is a multiple of {num_parts}. Pad them."
            )
    if axis == "cp" and mesh.world.kind.shards_attention:
        return _torch_context_parallel(mesh, config, tensors, dims, dropped)
    if axis == "cp" and mesh.world.device.type != "cpu" and config.cp_handler.cp_comm_strategy != "allgather":
        raise SettingError(
            f"cp_comm_strategy={config.cp_handler.cp_comm_strategy!r} on {mesh.world.device.type}: a ring of ranks has "
            "kernels for CUDA and the CPU only. Use TorchContextParallelConfig(cp_comm_strategy='allgather')."
        )
    return _split(mesh, axis, config, tensors, dims, dropped)


@contextmanager
def _torch_context_parallel(
    mesh: Mesh, config: ParallelismConfig, tensors: list[torch.Tensor], dims: list[int], dropped: set[torch.Tensor]
) -> Generator[None]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    set_ring_rotation(config.cp_handler.cp_comm_strategy)
    # Torch shards these kernels. With the plain one, each rank would silently see only its part of the sequence.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with (
        sdpa_kernel(kernels),
        context_parallel(mesh.over("cp"), buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=dropped),
    ):
        yield


@contextmanager
def _split(
    mesh: Mesh,
    axis: str,
    config: ParallelismConfig,
    tensors: list[torch.Tensor],
    dims: list[int],
    dropped: set[torch.Tensor],
) -> Generator[None]:
    attention = _attention_over(mesh, axis if axis == "sp" else config.cp_handler.cp_comm_strategy)
    full_data = [tensor.data for tensor in tensors]
    for tensor, dim in zip(tensors, dims, strict=True):
        tensor.data = sequence_shard(tensor.data, dim, mesh.place(axis), mesh.size(axis), balanced=axis == "cp")
    namespaces = _attention_namespaces(len(sys.modules))
    for namespace in namespaces:
        namespace[_NAME] = attention
    try:
        yield
    finally:
        for namespace in namespaces:
            namespace[_NAME] = TORCH_ATTENTION
        for tensor, data in zip(tensors, full_data, strict=True):
            if not any(tensor is one for one in dropped):
                tensor.data = data


@final
class ShardedAttention:
    """The function that replaces torch's attention while sequences are sharded; it counts its calls."""

    def __init__(self, function: Attention) -> None:
        self._function = function
        self.num_calls: int = 0

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.num_calls += 1
        return self._function(*args, **kwargs)


@lru_cache(maxsize=16)  # return the same object in every block, so that compiled code is reused
def _attention_over(mesh: Mesh, kind: str) -> ShardedAttention:
    axis = "sp" if kind == "sp" else "cp"
    ring = Ring(mesh.group(axis), mesh.place(axis), mesh.size(axis))
    kinds: dict[str, Callable[[Ring], Attention]] = {
        "sp": ulysses_attention,
        "allgather": allgather_attention,
        "alltoall": ring_attention,
    }
    return ShardedAttention(kinds[kind](ring))


@lru_cache(maxsize=1)
def _attention_namespaces(num_modules: int) -> list[dict[str, object]]:
    """Return the namespaces with torch's attention: torch's own, and modules that imported it by name."""
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return [space for space in spaces if space.get(_NAME) is TORCH_ATTENTION]


def sequence_shard(tensor: torch.Tensor, dim: int, rank: int, size: int, *, balanced: bool) -> torch.Tensor:
    """Return the part of a sequence that ``rank`` of ``size`` has.

    ``balanced`` gives each rank one chunk from the front and its mirror image from the back, so that all ranks have the
    same amount of work under a causal mask.
    """
    if not balanced:
        return tensor.chunk(size, dim)[rank].contiguous()
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


# -- models ------------------------------------------------------------------------------------------------


def prepare_attention(model: torch.nn.Module, mesh: Mesh) -> None:
    """Prepare the attention of ``model`` for sequences that :func:`split_sequences` shards.

    Raises:
        PreparationError: other layers of ``model`` than attention need the full sequence.
    """
    if not mesh.active("cp", "sp"):
        return
    refuse_recurrent_layers(model)
    if mesh.active("cp"):
        refuse_windows(model)
    attach_context_parallel_hooks(model)
    if mesh.active("sp") or not mesh.world.kind.shards_attention:
        _check_attention_is_sharded(model)


def _check_attention_is_sharded(model: torch.nn.Module) -> None:
    """Register hooks that raise if a forward over sharded sequences never calls sharded attention."""
    before: list[int] = []

    def note(_: torch.nn.Module, __: object) -> None:
        current: Any = functional.scaled_dot_product_attention
        before[:] = [current.num_calls] if isinstance(current, ShardedAttention) else []

    def compare(_: torch.nn.Module, __: object, ___: object) -> None:
        current: Any = functional.scaled_dot_product_attention
        is_blind = isinstance(current, ShardedAttention) and before == [current.num_calls]
        if is_blind and not has_compiled_regions(model):
            raise PreparationError(
                f"{type(model).__name__} computed no attention by torch.nn.functional.scaled_dot_product_attention, so "
                "each rank saw its own part of the sequence only. Use that function (models of transformers: "
                "attn_implementation='sdpa')."
            )

    model.register_forward_pre_hook(note)
    model.register_forward_hook(compare)


# --------------------------------------------------------------------------------------------------
# Attention over a sharded sequence: all-gather and ring
#
# * all-gather: every rank gathers all keys and values (Llama 3 report, 2024).
# * ring: partial results are merged by their log-sum-exp (Liu et al., "Ring Attention with Blockwise Transformers for
#   Near-Infinite Context", 2023).

Attention = Callable[..., torch.Tensor]

#: torch's own, whatever replaces it while sequences are sharded.
TORCH_ATTENTION: Final[Attention] = functional.scaled_dot_product_attention
#: The same operator. In a mode such as `torch.set_default_device`, torch looks the function up by its replaced name.
_COMPUTE: Final[Attention] = torch.ops.aten.scaled_dot_product_attention


@final
class Ring:
    """The ranks over which a sequence is sharded, in the order of the sequence."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank: int = rank
        self.size: int = size

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Send ``parts[i]`` to rank ``i``, and return the received parts by rank in the first dimension."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def send_recv(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start sending ``tensor`` to the next rank; return the previous rank's tensor, and the work to wait for."""
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        sizes_out, sizes_in = [0] * self.size, [0] * self.size
        sizes_out[(self.rank + 1) % self.size] = sizes_in[(self.rank - 1) % self.size] = sent.numel()
        work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), sizes_in, sizes_out, group=self.group, async_op=True
        )
        assert work is not None, "asynchronous, by a rank of the group"
        return received, work


def refuse_mask(attn_mask: torch.Tensor | None) -> None:
    """Raise if a mask was given.

    Raises:
        PreparationError: a mask was given.
    """
    if attn_mask is not None:
        raise PreparationError(
            "Attention over a sequence that is sharded over ranks takes no attn_mask: a rank's mask covers its part "
            "only. Use is_causal=True or no mask; pad sequences on the right, and leave padding out of the labels."
        )


# -- all-gather --------------------------------------------------------------------------------------------


@final
class _Gathered(Function):
    """An all-gather of the parts in the order of ranks; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ring: Ring) -> torch.Tensor:
        ctx.ring = ring
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ring.size)]
        dist.all_gather(parts, part.contiguous(), group=ring.group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ring.all_to_all(gradients[0]).sum(0), None


def allgather_attention(ring: Ring) -> Attention:
    """Return an attention function that all-gathers keys and values."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: object,
    ) -> torch.Tensor:
        refuse_mask(attn_mask)
        gathered: Any = _Gathered.apply(torch.cat([key, value], -1), ring)
        keys, values = _in_order(gathered).split([key.shape[-1], value.shape[-1]], -1)
        if not is_causal:
            return _COMPUTE(query, keys, values, None, dropout_p, False, **options)
        rows = query.shape[-2] // 2
        found: list[torch.Tensor] = []
        for own, index in zip(query.split(rows, -2), (ring.rank, 2 * ring.size - 1 - ring.rank), strict=True):
            seen = (index + 1) * rows
            mask = _causal(rows, seen, query.device)
            found.append(_COMPUTE(own, keys[..., :seen, :], values[..., :seen, :], mask, dropout_p, False, **options))
        return torch.cat(found, -2)

    return attention


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the full sequence from the two chunks of each rank (``[ranks, ..., positions, features]``)."""
    front, back = parts.chunk(2, -2)
    return torch.cat([*front.unbind(0), *back.flip(0).unbind(0)], -2)


@lru_cache(maxsize=64)
def _causal(rows: int, seen: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask ``[rows, seen]`` of the last ``rows`` of ``seen`` positions."""
    return torch.ones(rows, seen, dtype=torch.bool, device=device).tril(seen - rows)


# -- ring --------------------------------------------------------------------------------------------------


def _rows_of(ring: Ring, step: int, is_causal: bool, length: int) -> tuple[slice, slice, bool]:
    """Return the slices of queries and keys for ``step`` of the ring, and whether it is causal."""
    everything = slice(0, length)
    if step == 0 or not is_causal:
        return everything, everything, is_causal
    # The front chunk of an earlier rank precedes all queries, and its back chunk follows them. Both chunks of a later
    # rank are between the two chunks of the queries.
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
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        length, width = query.shape[-2], key.shape[-1]
        block = torch.cat([key, value], -1)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=wide, device=query.device)
        weight = torch.full(query.shape[:-1], float("-inf"), dtype=wide, device=query.device)
        for step in range(ring.size):
            following, work = ring.send_recv(block) if step < ring.size - 1 else (block, None)
            rows, keys, causal = _rows_of(ring, step, is_causal, length)
            part, part_weight = attention_on_cpu(
                query[..., rows, :],
                block[..., keys, :width].contiguous(),
                block[..., keys, width:].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            before = weight[..., rows]
            both = torch.logaddexp(before, part_weight)
            out[..., rows, :] *= (before - both).exp().unsqueeze(-1)
            out[..., rows, :] += part.to(wide) * (part_weight - both).exp().unsqueeze(-1)
            weight[..., rows] = both
            if work is not None:
                work.wait()
            block = following
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.rest = ring, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, weight = ctx.saved_tensors
        ring, is_causal, scale = ctx.rest
        length, width = query.shape[-2], key.shape[-1]
        block = torch.cat([key, value], -1)
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query, of_block = torch.zeros_like(query, dtype=wide), torch.zeros_like(block, dtype=wide)
        for step in range(ring.size):
            following, work = ring.send_recv(block) if step < ring.size - 1 else (block, None)
            rows, keys, causal = _rows_of(ring, step, is_causal, length)
            found = attention_on_cpu_backward(
                gradients[0][..., rows, :].contiguous(),
                query[..., rows, :].contiguous(),
                block[..., keys, :width].contiguous(),
                block[..., keys, width:].contiguous(),
                out[..., rows, :].contiguous(),
                weight[..., rows].contiguous(),
                0.0,
                causal,
                scale=scale,
            )
            of_query[..., rows, :] += found[0]
            of_block[..., keys, :width] += found[1]
            of_block[..., keys, width:] += found[2]
            if work is not None:
                work.wait()
            block = following
            of_block, sent = ring.send_recv(of_block)  # once per rank, so that a gradient returns to its block's rank
            sent.wait()
        of_key, of_value = of_block.split([width, value.shape[-1]], -1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def ring_attention(ring: Ring) -> Attention:
    """Return an attention function that sends keys and values around the ring of ranks."""

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
    """Repeat each head of ``tensor`` to get the number of heads of ``like``."""
    return tensor.repeat_interleave(like.shape[-3] // tensor.shape[-3], -3)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast ``tensors`` as torch's own attention does under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


# --------------------------------------------------------------------------------------------------
# Ulysses sequence parallelism: all-to-all between sequence and heads around attention
#
# Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
# Models", 2023. Needs no DeepSpeed.


@final
class _AllToAll(Function):
    """An all-to-all that moves the sharding of ``tensor`` from one dimension to another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ring: Ring, split_dim: int, concat_dim: int) -> torch.Tensor:
        ctx.rest = ring, split_dim, concat_dim
        return _all_to_all(tensor, ring, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring, split_dim, concat_dim = ctx.rest
        return _all_to_all(gradients[0], ring, concat_dim, split_dim), None, None, None


def _all_to_all(tensor: torch.Tensor, ring: Ring, split_dim: int, concat_dim: int) -> torch.Tensor:
    parts = torch.stack(tensor.chunk(ring.size, split_dim))
    return torch.cat(ring.all_to_all(parts).unbind(0), concat_dim)


def ulysses_attention(ring: Ring) -> Attention:
    """Return an attention function that computes some of the heads over full sequences."""

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
                f"sp_size={ring.size} splits attention heads over ranks, and doesn't divide this model's "
                f"{query.shape[-3]} heads. Choose another size, or context parallelism (cp_size), which needs no heads."
            )
        if key.shape[-3] % ring.size:
            key, value, enable_gqa = as_many_heads(key, query), as_many_heads(value, query), False
        heads: list[Any] = [_AllToAll.apply(tensor, ring, -3, -2) for tensor in (query, key, value)]
        mixed = _COMPUTE(*heads, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        output: Any = _AllToAll.apply(mixed, ring, -2, -3)
        return output

    return attention
