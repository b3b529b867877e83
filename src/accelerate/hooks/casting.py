"""Weights in a small dtype while they wait, in a larger one while they compute."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from .base import ModelHook

#: The layers whose arithmetic torch does in one dtype, so that a cast around them changes nothing else.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """The module's weights have ``storage_dtype``, and ``compute_dtype`` while it runs."""

    runs_compiled = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """The weights have the dtype they wait in."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights have the dtype they compute in."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """The weights have the dtype they wait in."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
