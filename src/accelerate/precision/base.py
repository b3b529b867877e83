"""A precision, as the list of moments in which it may act."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from ..torch_private.optim import has_scaled_gradients
from .conversion import ConversionReport


class Precision(ABC):
    """In which number format a model computes. Every moment is a no-op unless the precision acts in it."""

    #: The gradient scaler, where the precision needs one; callers may assign another.
    scaler: Any = None
    #: Whether forward passes run under autocast; callers may switch it off.
    is_autocast: bool = False
    #: The AutocastKwargs, where there are any.
    handler: Any = None

    #: Which modules were converted, one report for each model that was; a precision that converts has its own list.
    reports: Sequence[ConversionReport] = ()
    #: The package that converts, in the word of the interface (AO, TE, MSAMP).
    backend: str | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The word of the interface: no, fp16, bf16, fp8."""

    def convert_together(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]]:
        """The models and optimizers of one ``prepare``, as many, where the two can only be converted at once."""
        return models, optimizers

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its modules or weights as the precision needs them; called first in ``place``."""
        return model

    def patch_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` computes in this precision."""

    def patch_wrapped(self, model: torch.nn.Module) -> None:
        """The forward of ``model``, in the container that trains it, computes in this precision."""

    def restore_forward(self, model: torch.nn.Module) -> None:
        """``model.forward`` is what it was before :meth:`patch_forward`."""

    def follow(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """What has to happen at every update of prepared ``models`` will; called last in ``prepare``."""

    def autocast(self, handler: Any = None) -> AbstractContextManager[Any]:
        """A context in which operations run in this precision."""
        return nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of ``optimizer`` are in true units; a second call in one window changes nothing."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        # GradScaler raises on a second unscale_; a loop that clips twice, or clips two models, is no mistake.
        if has_scaled_gradients(scaler, optimizer):
            scaler.unscale_(optimizer)


@final
class FullPrecision(Precision):
    """The model computes in the dtypes that it has."""

    @property
    def label(self) -> str:
        """no."""
        return "no"
