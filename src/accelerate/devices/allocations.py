"""Track every allocation of code that runs on tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, Literal, final, get_args

import torch

from ..settings import env
from ..torch_private.tracing import (
    TorchDispatchMode,
    grouped_mm_operator,
    storage_key,
    tree_leaves,
    vector_instructions,
)
from .table import CPU

Kind = Literal["weights", "buffers", "gradients", "optimizer", "gathered", "other"]
_KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: Accelerators allocate multiples of this size (kMinBlockSize in torch's CUDA caching allocator), the host any number
#: of bytes.
_PIECE_BYTES = 512
_GROUPED: Any = grouped_mm_operator()


@final
class AllocationTracker(TorchDispatchMode):
    """A dispatch mode that tracks the live bytes on ``device``, by purpose."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._piece = 1 if device.type == CPU.name else _PIECE_BYTES
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Kind]] = {}
        self.num_bytes: dict[Kind, int] = dict.fromkeys(_KINDS, 0)
        #: Called after each allocation.
        self.on_growth: Callable[[], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the memory that it allocates for its result."""
        del types
        result = _shaped(func, args, kwargs or {})
        if self._device_type == CPU.name:
            result = with_workspace(func, args, result)
        if self.count(tree_leaves(result)) and self.on_growth is not None:
            self.on_growth()
            temporary = temporary_bytes(func, args, result) if self._device_type == CPU.name else 0
            if temporary:
                self.num_bytes["other"] += temporary
                self.on_growth()
                self.num_bytes["other"] -= temporary
        return result

    def count(self, tensors: Iterable[object], kind: Kind | None = None) -> bool:
        """Count the memory of the tensors, as ``kind`` if given; return whether some of it is new."""
        grown = False
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            found = self._known.get(key)
            if found is None:
                self._add(key, storage, kind or "other")
                grown = True
            elif kind is not None and found[2] != kind:
                self.num_bytes[found[2]] -= found[1]
                self.num_bytes[kind] += found[1]
                self._known[key] = (found[0], found[1], kind)
        return grown

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the count for a storage whose size has changed."""
        found = self._known.get(storage_key(storage))
        if found is not None:
            reference, before, kind = found
            num_bytes = self._rounded(storage.nbytes())
            self._known[storage_key(storage)] = (reference, num_bytes, kind)
            self.num_bytes[kind] += num_bytes - before

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._piece) * self._piece

    def _add(self, key: int, storage: torch.UntypedStorage, kind: Kind) -> None:
        num_bytes = self._rounded(storage.nbytes())

        def freed(_: object) -> None:
            _, size, last_kind = self._known.pop(key)
            self.num_bytes[last_kind] -= size

        self._known[key] = (weakref.ref(storage, freed), num_bytes, kind)
        self.num_bytes[kind] += num_bytes


def _shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on tensors without values."""
    if func is _GROUPED:
        # These operations take any dtype, but without values torch infers the shape of the result for one dtype only.
        first, second, *others = args
        result = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *others, **kwargs)
        return result.to(first.dtype)
    return func(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# Memory of oneDNN's CPU kernels beside their results: blocked copies of images, workspaces of recurrent layers
#
# Tensors without values don't have this memory. The sizes are those of oneDNN as torch calls it, found by measuring the
# peak of real steps (benchmarks/estimates.py); tests/unit/estimate/test_trace.py checks that they are within 3 %.
# Kernels and their copies depend on the processor's instructions.

#: The channels in one block of an image, by the widest vector instructions.
_BLOCK_CHANNELS: Final = {"AVX512": 16, "AVX2": 8, "": 8}
_PAGE_BYTES: Final = 4096
_ALIGNED: Final = 16  # numbers that a row of a workspace is rounded up to
_CLASHING: Final = 256  # rows of a multiple of this would share cache lines, so they are made longer
_NUM_GATES: Final = 4  # of an LSTM, the only recurrent layer that oneDNN computes for torch


def with_workspace(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return ``result`` with the recurrent layer's workspace in the size for tensors with values."""
    is_training = func.overloadpacket is torch.ops.aten.mkldnn_rnn_layer and args[15]
    return (*result[:3], result[3].new_empty(_lstm_workspace(args[0], args[1]))) if is_training else result


def temporary_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes that the operation allocates and frees before it returns."""
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
        return _lstm_temporary_bytes(args[0], args[1], None)
    if name is torch.ops.aten.mkldnn_rnn_layer_backward:
        return _lstm_temporary_bytes(args[0], args[1], args[10])
    return 0


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- images ------------------------------------------------------------------------------------------------


@cache
def _instructions() -> str:
    """Return the processor's widest vector instructions, as limited by oneDNN's environment variable."""
    limit = (env.read("ONEDNN_MAX_CPU_ISA") or env.read("DNNL_MAX_CPU_ISA") or "").upper()
    if limit in ("SSE41", "AVX"):
        return ""
    found = vector_instructions()
    return "AVX2" if limit.startswith("AVX2") and found else found


def _in_blocks(image: torch.Tensor) -> int:
    channels, block = image.shape[1], _BLOCK_CHANNELS[_instructions()]
    return _bytes_of(image) // channels * -(-channels // block) * block


def _read_in_blocks(image: torch.Tensor) -> int:
    """Return the bytes of an image's blocked copy; 0 if it has few channels and is read directly."""
    return _in_blocks(image) if image.shape[1] >= _BLOCK_CHANNELS[_instructions()] else 0


# -- sequences ---------------------------------------------------------------------------------------------


def _row(length: int) -> int:
    """Return the padded number of elements of a workspace row with ``length`` elements."""
    row = -(-length // _ALIGNED) * _ALIGNED
    return row + _ALIGNED if row % _CLASHING == 0 else row


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _lstm_workspace(sequence: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of one LSTM layer's workspace: gates, states and their gradients, for every step."""
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


def _lstm_temporary_bytes(sequence: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor | None) -> int:
    """Return the temporary bytes of an LSTM layer: reordered weights, and gates or their gradients of all steps."""
    single = torch.float32.itemsize
    steps, batch, width = sequence.shape
    gates = _row(weight.shape[0])
    packed = (width + weight.shape[0] // _NUM_GATES) * gates
    if sequence.dtype is torch.float32:
        copied = 0 if gradient is None or gradient.is_contiguous() else gradient.numel()
        return (packed + steps * batch * gates + copied) * single
    in_single = 0 if gradient is None else packed + gradient.numel()
    return packed * sequence.element_size() + in_single * single
