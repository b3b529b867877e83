"""Half-precision outputs of a model as float32, so that losses and metrics are computed in full precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any

from ..nested import convert_to_fp32


class ConvertOutputsToFp32:
    """A forward whose half-precision outputs come back as float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise TypeError(
            "A forward prepared for mixed precision can't be pickled. Pickle the model itself, after "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """``model_forward`` as a function whose half-precision outputs are float32."""
    converter = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    return forward
