"""Mixed precision by autocast: fp16 (with a gradient scaler) and bf16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any, final

import torch
from torch.amp.grad_scaler import OptState

from ..nested import convert_to_fp32
from .base import Precision

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@final
class AutocastPrecision(Precision):
    """Forward passes under autocast in fp16 or bf16, with outputs back in ``output_dtype``.

    Args:
        label: ``"fp16"`` or ``"bf16"``.
        device_type: where autocast acts (``"cuda"``, ``"cpu"``, ...).
        scaler: the gradient scaler (fp16), or None.
        handler: AutocastKwargs; its ``output_dtype=None`` leaves outputs in the compute dtype.
    """

    def __init__(self, label: str, device_type: str, scaler: Any = None, handler: Any = None) -> None:
        self._label = label
        self.scaler = scaler
        self._device_type = device_type
        self._dtype = _HALF[label]
        self._handler = handler

    @property
    def label(self) -> str:
        """fp16 or bf16."""
        return self._label

    @property
    def is_autocast(self) -> bool:
        """True."""
        return True

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """A context in which operations run in half precision, as ``handler`` (or the constructor's) says."""
        chosen = handler or self._handler
        if chosen is None:
            return torch.autocast(self._device_type, dtype=self._dtype)
        if not chosen.enabled:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=chosen.cache_enabled)

    def patch_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` runs under autocast; half-precision outputs are float32 unless asked otherwise."""
        if "_original_forward" in model.__dict__:
            return
        original = model.forward
        model._original_forward = original  # pyright: ignore[reportArgumentType]
        converts = self._handler is None or getattr(self._handler, "output_dtype", torch.float32) is not None
        forward = _autocast_forward(original, self.autocast, convert_to_fp32 if converts else None)
        model.forward = MethodType(forward, model)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` is the user's again."""
        restore_forward(model)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` are in true units (fp16); a second call in one window changes nothing."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        # GradScaler raises on a second unscale_; a loop that clips twice, or clips two models, is no mistake.
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)


def _autocast_forward(
    original: Callable[..., Any],
    autocast: Callable[[], AbstractContextManager[Any]],
    convert: Callable[[Any], Any] | None,
) -> Callable[..., Any]:
    # Built as a function that takes `self`, so that a deep copy of the model runs the copy's own forward, and a
    # pickled model comes back with its class's forward.
    function = original.__func__ if isinstance(original, MethodType) else None

    @wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast():
            outputs = function(self, *args, **kwargs) if function else original(*args, **kwargs)
        return outputs if convert is None else convert(outputs)

    return forward


def restore_forward(model: torch.nn.Module) -> None:
    """``model.forward`` is what it was before it was patched."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    model.__dict__.pop("forward", None)
    if model.forward != original:  # an instance attribute of the user's
        model.forward = original
