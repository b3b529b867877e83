"""Count the bytes of tensors that live at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that lived at once, of those that were made in its context.

    Args:
        known: tensors whose memory doesn't count.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live = 0
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the result; operations on DTensors come again as what they are made of."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` once, until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)

        def freed() -> None:
            self._known.discard(key)
            self._live -= size

        weakref.finalize(storage, freed).atexit = False
