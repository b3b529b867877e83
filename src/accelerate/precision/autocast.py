"""Mixed precision by autocast: fp16 (with a gradient scaler) and bf16."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Final, TypeVar, final

import torch

from ..devices.table import kind_of
from ..errors import SettingError
from ..nested import convert_to_fp32, recursively_apply
from .base import Precision

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs

T = TypeVar("T")

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Autocasting(Precision, ABC):
    """The base of precisions that run forwards under autocast in ``dtype`` and cast outputs to ``output_dtype``.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        device_type: the device type for autocast (``"cuda"``, ``"cpu"``, ...).
        scaler: the gradient scaler (fp16), or None.
        handler: AutocastKwargs; with ``output_dtype=None``, outputs stay in the compute dtype.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device_type: str,
        scaler: torch.amp.GradScaler | None = None,
        handler: AutocastKwargs | None = None,
    ) -> None:
        self.scaler = scaler
        self._device_type = device_type
        self._dtype = dtype
        self.handler = handler
        self.is_autocast = True

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Enter a context in which operations run in half precision, as ``handler`` or the constructor's says."""
        if not self.is_autocast:
            return nullcontext()
        chosen = handler or self.handler
        if chosen is None:
            return torch.autocast(self._device_type, dtype=self._dtype)
        # Also enter a disabled autocast: inside another autocast block it restores full precision.
        return torch.autocast(
            self._device_type, dtype=self._dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Run ``model.forward`` under autocast; cast half-precision outputs to float32 by default."""
        if self.is_autocast:
            _patch_forward(model, self.handler, context=self.autocast)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Restore the original forward of ``model``."""
        restore_forward(model)


@final
class AutocastPrecision(Autocasting):
    """The precision ``"fp16"`` or ``"bf16"`` (``label``), with autocast."""

    def __init__(
        self,
        label: str,
        device_type: str,
        scaler: torch.amp.GradScaler | None = None,
        handler: AutocastKwargs | None = None,
    ) -> None:
        super().__init__(_HALF[label], device_type, scaler, handler)
        self._label = label

    @property
    def label(self) -> str:
        """The name: fp16 or bf16."""
        return self._label


def _is_patched(model: torch.nn.Module) -> bool:
    # A model that was pickled while it was patched has the attribute, and its class's forward.
    original = model.__dict__.get("_original_forward")
    return original is not None and model.__dict__.get("forward") != original


def _patch_forward(
    model: torch.nn.Module,
    handler: AutocastKwargs | None,
    *,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    dtype: torch.dtype | None = None,
) -> None:
    """Run ``model.forward`` in ``context``, and cast half-precision outputs to float32 unless ``handler`` says no.

    Args:
        dtype: cast floating-point inputs to it.
    """
    if _is_patched(model):
        return
    original = model.forward
    model._original_forward = original  # pyright: ignore[reportArgumentType]
    converts = handler is None or getattr(handler, "output_dtype", torch.float32) is not None
    is_method = isinstance(original, MethodType)
    function = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: object, **kwargs: object) -> object:
        if dtype is not None:
            args = (args[0], *_cast(args[1:], dtype)) if is_method else _cast(args, dtype)
            kwargs = _cast(kwargs, dtype)
        with context():
            outputs = function(*args, **kwargs)
        return convert_to_fp32(outputs) if converts else outputs

    # Keep it a method, so that a deep copy of the model runs its own forward, a pickled model is loaded with its
    # class's forward, and libraries read the user's signature.
    model.forward = MethodType(forward, model) if is_method else forward


def _cast(inputs: T, dtype: torch.dtype) -> T:
    return recursively_apply(lambda tensor: tensor.to(dtype), inputs, test_type=_is_floating)


def restore_forward(model: torch.nn.Module) -> None:
    """Restore the forward that ``model`` had before it was patched."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    model.__dict__.pop("forward", None)
    if model.forward != original:  # an instance attribute of the user's
        model.forward = original


# --------------------------------------------------------------------------------------------------
# True precision: a model whose parameters and computation have one dtype

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@final
class TruePrecision(Precision):
    """A precision with parameters, buffers, gradients and optimizer states in ``dtype``, without a float32 copy.

    Floating-point inputs are cast to ``dtype``; half-precision outputs are cast to float32, unless the handler's
    ``output_dtype`` is None.

    Args:
        handler: AutocastKwargs; only ``output_dtype`` is used.

    Raises:
        SettingError: ``dtype`` isn't a floating-point dtype, or the device doesn't support it.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, handler: AutocastKwargs | None = None) -> None:
        if dtype not in _DTYPES:
            raise SettingError(f"parameter_dtype={dtype!r}: choose one of {', '.join(map(str, _DTYPES))}.")
        kind = kind_of(device_type)
        lacks = (dtype is torch.bfloat16 and not kind.supports_bf16()) or (
            dtype is torch.float16 and not kind.supports_fp16()
        )
        if lacks:
            raise SettingError(f"parameter_dtype={dtype}: this {device_type} device can't compute in it. Leave it out.")
        self.dtype = dtype
        self.handler = handler

    @property
    def label(self) -> str:
        """The name: no, because precision isn't mixed."""
        return "no"

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cast the floating-point tensors of ``model`` to the dtype; the parameters stay the same objects."""
        return model.to(self.dtype)

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` accept inputs of any floating-point dtype."""
        _patch_forward(model, self.handler, dtype=self.dtype)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Restore the original forward of ``model``; its parameters keep the dtype."""
        restore_forward(model)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
