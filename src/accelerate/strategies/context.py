"""Sequences in parts over ranks: context parallelism and Ulysses sequence parallelism.

Inside :func:`split_sequences` the given tensors hold this rank's part of the sequence, and attention still sees whole
sequences. Everything else in a transformer works place by place, and needs to know nothing.

On accelerators context parallelism is torch's own; on CPU ranks, where torch refuses, it is that of ``ring.py``.
Ulysses (``sequence.py``) is for both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Final, final

import torch
from torch.nn import functional

from ..errors import PreparationError, SettingError
from ..hooks.attention import attach_context_parallel_hooks, refuse_recurrent_layers, refuse_windows
from ..mesh import Mesh
from ..torch_private.distributed import set_ring_rotation
from .compile import has_compiled_regions
from .ring import WHOLE_ATTENTION, Attention, Ring, around_the_ring, over_gathered
from .sequence import over_heads

_NAME: Final = "scaled_dot_product_attention"


def split_sequences(
    mesh: Mesh,
    config: Any,
    buffers: Sequence[torch.Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: set[torch.Tensor] | None,
) -> AbstractContextManager[None]:
    """A block in which ``buffers`` hold this rank's part of the sequence, and attention sees all of it.

    Args:
        buffers: inputs, labels, positions, ...: whatever has a sequence dimension. After the block they are whole.
        buffer_seq_dims: the sequence dimension of each.
        no_restore_buffers: those that may stay cut.

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
                f"A buffer of shape {list(tensor.shape)} can't be cut along dimension {dim}: {axis}_size="
                f"{mesh.size(axis)} takes sequences whose length is a multiple of {num_parts}. Pad them."
            )
    if axis == "cp" and mesh.world.device.type != "cpu":
        return _torchs_own(mesh, config, tensors, dims, dropped)
    return _split(mesh, axis, config, tensors, dims, dropped)


def _torchs_own(
    mesh: Mesh, config: Any, tensors: list[torch.Tensor], dims: list[int], dropped: set[torch.Tensor]
) -> AbstractContextManager[None]:
    from torch.distributed.tensor.experimental import context_parallel

    set_ring_rotation(config.cp_handler.cp_comm_strategy)
    return context_parallel(mesh.over("cp"), buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=dropped)


@contextmanager
def _split(
    mesh: Mesh, axis: str, config: Any, tensors: list[torch.Tensor], dims: list[int], dropped: set[torch.Tensor]
) -> Generator[None]:
    attention = _attention_over(mesh, axis if axis == "sp" else config.cp_handler.cp_comm_strategy)
    wholes = [tensor.data for tensor in tensors]
    for tensor, dim in zip(tensors, dims, strict=True):
        tensor.data = part_of(tensor.data, dim, mesh.place(axis), mesh.size(axis), balanced=axis == "cp")
    places = _places_of_attention(len(sys.modules))
    for place in places:
        place[_NAME] = attention
    try:
        yield
    finally:
        for place in places:
            place[_NAME] = WHOLE_ATTENTION
        for tensor, whole in zip(tensors, wholes, strict=True):
            if not any(tensor is one for one in dropped):
                tensor.data = whole


@final
class SplitAttention:
    """What stands for torch's attention while sequences are cut."""

    def __init__(self, function: Attention) -> None:
        self._function = function
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.num_calls += 1
        return self._function(*args, **kwargs)


@lru_cache(maxsize=16)  # the same object in every block: compiled code is kept
def _attention_over(mesh: Mesh, way: str) -> SplitAttention:
    axis = "sp" if way == "sp" else "cp"
    ring = Ring(mesh.group(axis), mesh.place(axis), mesh.size(axis))
    ways: dict[str, Callable[[Ring], Attention]] = {
        "sp": over_heads,
        "allgather": over_gathered,
        "alltoall": around_the_ring,
    }
    return SplitAttention(ways[way](ring))


@lru_cache(maxsize=1)
def _places_of_attention(num_modules: int) -> list[dict[str, Any]]:
    """The namespaces in which code finds torch's attention: torch's own, and those that imported it by name."""
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return [space for space in spaces if space.get(_NAME) is WHOLE_ATTENTION]


def part_of(tensor: torch.Tensor, dim: int, rank: int, size: int, *, balanced: bool) -> torch.Tensor:
    """The part of a sequence that ``rank`` of ``size`` has.

    ``balanced``: one piece from the front and its mirror image from the back, so that under a causal mask all ranks
    have equally much to do.
    """
    if not balanced:
        return tensor.chunk(size, dim)[rank].contiguous()
    pieces = tensor.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


# -- models ------------------------------------------------------------------------------------------------


def prepare_attention(model: torch.nn.Module, mesh: Mesh) -> None:
    """The attention of ``model`` can see whole sequences where :func:`split_sequences` cuts them.

    Raises:
        PreparationError: layers of ``model`` need the sequence in one piece for more than attention.
    """
    if not mesh.active("cp", "sp"):
        return
    refuse_recurrent_layers(model)
    if mesh.active("cp"):
        refuse_windows(model)
    attach_context_parallel_hooks(model)
    if mesh.world.device.type == "cpu" or mesh.active("sp"):
        _watch_attention(model)


def _watch_attention(model: torch.nn.Module) -> None:
    """A forward over cut sequences raises when its attention saw nothing of the other parts."""
    before: list[int] = []

    def note(_: torch.nn.Module, __: Any) -> None:
        current: Any = functional.scaled_dot_product_attention
        before[:] = [current.num_calls] if isinstance(current, SplitAttention) else []

    def compare(_: torch.nn.Module, __: Any, ___: Any) -> None:
        current: Any = functional.scaled_dot_product_attention
        is_blind = isinstance(current, SplitAttention) and before == [current.num_calls]
        if is_blind and not has_compiled_regions(model):
            raise PreparationError(
                f"{type(model).__name__} computed no attention by torch.nn.functional.scaled_dot_product_attention, so "
                "each rank saw its own part of the sequence only. Use that function (models of transformers: "
                "attn_implementation='sdpa')."
            )

    model.register_forward_pre_hook(note)
    model.register_forward_hook(compare)
