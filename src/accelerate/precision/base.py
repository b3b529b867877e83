"""A precision, as the list of moments in which it may act."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch


class Precision(ABC):
    """In which number format a model computes. Every moment is a no-op unless the precision acts in it."""

    #: The gradient scaler, where the precision needs one.
    scaler: Any = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The word of the interface: no, fp16, bf16, fp8."""

    @property
    def is_autocast(self) -> bool:
        """Whether forward passes run under autocast."""
        return False

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its modules or weights as the precision needs them; called first in ``place``."""
        return model

    def patch_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` computes in this precision."""

    def restore_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` is what it was before :meth:`patch_forward`."""

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """A context in which operations run in this precision."""
        return nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` are in true units; a second call in one window changes nothing."""


@final
class FullPrecision(Precision):
    """The model computes in the dtypes that it has."""

    @property
    def label(self) -> str:
        """no."""
        return "no"
