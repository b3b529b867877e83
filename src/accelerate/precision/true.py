"""True half, true double: a model that is made of one dtype, parameters and all, and computes in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Final, final

import torch

from ..devices import kind_of
from ..errors import SettingError
from ..nested import convert_to_fp32, recursively_apply
from .autocast import restore_forward
from .base import Precision

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@final
class TruePrecision(Precision):
    """Parameters, buffers, gradients and optimizer states in ``dtype``; nothing is kept in another.

    Floating-point inputs are made ``dtype``; half-precision outputs are float32, unless the handler's
    ``output_dtype`` is None.

    Args:
        handler: AutocastKwargs, of which ``output_dtype`` counts.

    Raises:
        SettingError: no floating-point dtype, or one that the device doesn't compute in.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, handler: Any = None) -> None:
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
        """no: nothing is mixed."""
        return "no"

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """``model`` whose floating-point tensors are in the dtype; the parameters are the same objects."""
        return model.to(self.dtype)

    def patch_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` takes inputs of any floating-point dtype."""
        if "_original_forward" in model.__dict__:
            return
        original = model.forward
        model._original_forward = original  # pyright: ignore[reportArgumentType]
        keeps = self.handler is not None and getattr(self.handler, "output_dtype", torch.float32) is None
        model.forward = _forward_in(self.dtype, model, original, None if keeps else convert_to_fp32)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` is the user's again; its parameters stay in the dtype."""
        restore_forward(model)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _forward_in(
    dtype: torch.dtype,
    model: torch.nn.Module,
    original: Callable[..., Any],
    convert: Callable[[Any], Any] | None,
) -> Callable[..., Any]:
    is_method = isinstance(original, MethodType)
    function = original.__func__ if is_method else original

    def cast(value: Any) -> Any:
        return recursively_apply(lambda tensor: tensor.to(dtype), value, test_type=_is_floating)

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_method:
            args = (args[0], *cast(args[1:]))
        else:
            args = cast(args)
        outputs = function(*args, **cast(kwargs))
        return outputs if convert is None else convert(outputs)

    return MethodType(forward, model) if is_method else forward
