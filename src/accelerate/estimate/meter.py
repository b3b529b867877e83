"""Every allocation of a piece of code, counted as it is made and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, final

import torch

from ..devices import CPU
from ..torch_private.tracing import TorchDispatchMode, grouped_product, identity_of, tree_leaves
from .host_kernels import passing_bytes, with_workspace

Kind = Literal["weights", "buffers", "gradients", "optimizer", "other"]

#: Accelerators hand out memory in pieces of this size, the host any number of bytes.
_PIECE_BYTES = 512
_GROUPED: Any = grouped_product()


@final
class AllocationMeter(TorchDispatchMode):
    """Within the block, the bytes that live on ``device`` are known at any moment, by what they are for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type
        self._piece = 1 if device.type == CPU.name else _PIECE_BYTES
        self._known: dict[int, tuple[weakref.ref[Any], int, Kind]] = {}
        self.num_bytes: dict[Kind, int] = dict.fromkeys(("weights", "buffers", "gradients", "optimizer", "other"), 0)
        #: Told of each moment at which something new lives.
        self.on_growth: Callable[[], None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of the operation, its new memory counted."""
        del types
        result = _shaped(func, args, kwargs or {})
        if self._device_type == CPU.name:
            result = with_workspace(func, args, result)
        if self.count(tree_leaves(result)) and self.on_growth is not None:
            self.on_growth()
            passing = passing_bytes(func, args, result) if self._device_type == CPU.name else 0
            if passing:
                self.num_bytes["other"] += passing
                self.on_growth()
                self.num_bytes["other"] -= passing
        return result

    def count(self, tensors: Iterable[Any], kind: Kind | None = None) -> bool:
        """Whether one of the tensors has memory that wasn't known; with ``kind``, all of it is of that kind now."""
        grown = False
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            key = identity_of(storage)
            found = self._known.get(key)
            if found is None:
                self._add(key, storage, kind or "other")
                grown = True
            elif kind is not None and found[2] != kind:
                self.num_bytes[found[2]] -= found[1]
                self.num_bytes[kind] += found[1]
                self._known[key] = (found[0], found[1], kind)
        return grown

    def _add(self, key: int, storage: torch.UntypedStorage, kind: Kind) -> None:
        num_bytes = -(-storage.nbytes() // self._piece) * self._piece

        def freed(_: Any) -> None:
            _, size, last_kind = self._known.pop(key)
            self.num_bytes[last_kind] -= size

        self._known[key] = (weakref.ref(storage, freed), num_bytes, kind)
        self.num_bytes[kind] += num_bytes


def _shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the operation."""
    if func is _GROUPED:
        # Computed in any dtype; without values torch knows the shape of the result for one only.
        first, second, *others = args
        result = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *others, **kwargs)
        return result.to(first.dtype)
    return func(*args, **kwargs)
