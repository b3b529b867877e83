"""What the CPU's own kernels (oneDNN) take beside their results: blocks of images, workspaces of recurrent layers.

Tensors without values don't show it. The sizes are those of oneDNN as torch calls it, found by measuring. Its kernels
differ by the processor's instructions, and so do their copies.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch

from ..settings import env
from ..torch_private.tracing import vector_instructions

#: By the widest vectors: how many channels of an image lie together.
_BLOCK_CHANNELS: Final = {"AVX512": 16, "AVX2": 8, "": 8}
_PAGE_BYTES: Final = 4096
_ALIGNED: Final = 16  # numbers that a row of a workspace is rounded up to
_CLASHING: Final = 256  # rows of a multiple of this would share cache lines, so they are made longer
_NUM_GATES: Final = 4  # of an LSTM, the only recurrent layer that oneDNN computes for torch


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """``result``, its workspace of the size that it has with values."""
    is_training = func.overloadpacket is torch.ops.aten.mkldnn_rnn_layer and args[15]
    return (*result[:3], result[3].new_empty(_lstm_workspace(args[0], args[1]))) if is_training else result


def passing_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """What the operation takes for itself and gives back."""
    name = func.overloadpacket
    if name is torch.ops.aten.convolution:
        image, weight = args[:2]
        copies = _read_in_blocks(image) + _in_blocks(result) + _bytes_of(weight)
        return max(copies - _bytes_of(result), _in_blocks(result))
    if name is torch.ops.aten.convolution_backward:
        gradient, image, weight = args[:3]
        copies = (_in_blocks(gradient), _read_in_blocks(image))
        # without AVX2, the gradients of image and weights are computed one after the other by plain products
        return (sum(copies) if _instructions() else max(copies)) + _bytes_of(weight)
    if name is torch.ops.aten.mkldnn_rnn_layer:
        return _lstm_passing(args[0], args[1], None)
    if name is torch.ops.aten.mkldnn_rnn_layer_backward:
        return _lstm_passing(args[0], args[1], args[10])
    return 0


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- images ------------------------------------------------------------------------------------------------


@cache
def _instructions() -> str:
    """What oneDNN computes with: the processor's widest vectors, unless a variable of its own limits it."""
    limit = (env.read("ONEDNN_MAX_CPU_ISA") or env.read("DNNL_MAX_CPU_ISA") or "").upper()
    if limit in ("SSE41", "AVX"):
        return ""
    found = vector_instructions()
    return "AVX2" if limit.startswith("AVX2") and found else found


def _in_blocks(image: torch.Tensor) -> int:
    channels, block = image.shape[1], _BLOCK_CHANNELS[_instructions()]
    return _bytes_of(image) // channels * -(-channels // block) * block


def _read_in_blocks(image: torch.Tensor) -> int:
    """An image of few channels is read as it is."""
    return _in_blocks(image) if image.shape[1] >= _BLOCK_CHANNELS[_instructions()] else 0


# -- sequences ---------------------------------------------------------------------------------------------


def _row(length: int) -> int:
    """The numbers that a row of ``length`` numbers takes."""
    row = -(-length // _ALIGNED) * _ALIGNED
    return row + _ALIGNED if row % _CLASHING == 0 else row


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _lstm_workspace(sequence: torch.Tensor, weight: torch.Tensor) -> int:
    """Of one layer in one direction: its gates, and its states with their gradients, at every step."""
    steps, batch, width = sequence.shape
    hidden = weight.shape[0] // _NUM_GATES
    number, single = sequence.element_size(), torch.float32.itemsize
    states = 2 * (steps + 1) * batch
    widest = _row(max(width, hidden))
    pieces = [
        steps * batch * _row(_NUM_GATES * hidden) * number,
        steps * batch * _row(hidden) * number,
        *[states * widest * number] * 2,
        states * widest * single,
        *[states * hidden * single] * 2,  # the memory cells are in single precision
    ]
    return sum(map(_pages, pieces))


def _lstm_passing(sequence: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor | None) -> int:
    """Weights in the order in which they are multiplied, and the gates, or their gradients, of all steps."""
    single = torch.float32.itemsize
    steps, batch, width = sequence.shape
    gates = _row(weight.shape[0])
    packed = (width + weight.shape[0] // _NUM_GATES) * gates
    if sequence.dtype is torch.float32:
        copied = 0 if gradient is None or gradient.is_contiguous() else gradient.numel()
        return (packed + steps * batch * gates + copied) * single
    in_single = 0 if gradient is None else packed + gradient.numel()
    return packed * sequence.element_size() + in_single * single
