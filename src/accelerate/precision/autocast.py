"""Mixed precision by autocast: fp16 (with a gradient scaler) and bf16."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any, final

import torch

from ..nested import convert_to_fp32
from .base import Precision

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Autocasting(Precision, ABC):
    """Forward passes under autocast in ``dtype``, with outputs back in the handler's ``output_dtype``.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        device_type: where autocast acts (``"cuda"``, ``"cpu"``, ...).
        scaler: the gradient scaler (fp16), or None.
        handler: AutocastKwargs; its ``output_dtype=None`` leaves outputs in the compute dtype.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, scaler: Any = None, handler: Any = None) -> None:
        self.scaler = scaler
        self._device_type = device_type
        self._dtype = dtype
        self.handler = handler
        self.is_autocast = True

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """A context in which operations run in half precision, as ``handler`` (or the constructor's) says."""
        if not self.is_autocast:
            return nullcontext()
        chosen = handler or self.handler
        if chosen is None:
            return torch.autocast(self._device_type, dtype=self._dtype)
        # Disabled is a context too: inside another autocast block it gives full precision back.
        return torch.autocast(
            self._device_type, dtype=self._dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def patch_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` runs under autocast; half-precision outputs are float32 unless asked otherwise."""
        if not self.is_autocast or _is_patched(model):
            return
        original = model.forward
        model._original_forward = original  # pyright: ignore[reportArgumentType]
        converts = self.handler is None or getattr(self.handler, "output_dtype", torch.float32) is not None
        model.forward = _autocast_forward(model, original, self.autocast, convert_to_fp32 if converts else None)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` is the user's again."""
        restore_forward(model)


@final
class AutocastPrecision(Autocasting):
    """``label`` is ``"fp16"`` or ``"bf16"``."""

    def __init__(self, label: str, device_type: str, scaler: Any = None, handler: Any = None) -> None:
        super().__init__(_HALF[label], device_type, scaler, handler)
        self._label = label

    @property
    def label(self) -> str:
        """fp16 or bf16."""
        return self._label


def _is_patched(model: torch.nn.Module) -> bool:
    # A model that was pickled while it was patched has the attribute, and its class's forward.
    original = model.__dict__.get("_original_forward")
    return original is not None and model.__dict__.get("forward") != original


def _autocast_forward(
    model: torch.nn.Module,
    original: Callable[..., Any],
    autocast: Callable[[], AbstractContextManager[Any]],
    convert: Callable[[Any], Any] | None,
) -> Callable[..., Any]:
    is_method = isinstance(original, MethodType)
    function = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            outputs = function(*args, **kwargs)
        return outputs if convert is None else convert(outputs)

    # A method stays one, so that a deep copy of the model runs the copy's own forward, a pickled model comes back
    # with its class's, and the signature that libraries read is the user's.
    return MethodType(forward, model) if is_method else forward


def restore_forward(model: torch.nn.Module) -> None:
    """``model.forward`` is what it was before it was patched."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    model.__dict__.pop("forward", None)
    if model.forward != original:  # an instance attribute of the user's
        model.forward = original
