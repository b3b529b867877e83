"""fp8 by MS-AMP: weights, gradients and optimizer states in 8-bit floats. The package is no longer developed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from ..errors import PreparationError
from ..optional import require
from .conversion import HOLDS_OTHERS, OTHER_KIND, report_conversion
from .fp8 import Fp8Precision


@final
class MsampPrecision(Fp8Precision):
    """MS-AMP's layers and optimizer, everything else under autocast in bf16, with a gradient scaler.

    Args:
        recipe: MSAMPRecipeKwargs, or the deprecated FP8RecipeKwargs.
    """

    backend = "MSAMP"

    def __init__(self, device_type: str, recipe: Any, *, handler: Any = None) -> None:
        super().__init__(device_type, torch.amp.GradScaler(device_type), handler)
        self._level: str = recipe.opt_level

    def convert_together(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]]:
        """The model and its optimizer as MS-AMP makes them, the model on its device.

        Raises:
            PreparationError: not one model and one optimizer, which MS-AMP makes at once.
        """
        if not models and not optimizers:
            return models, optimizers
        if len(models) != 1 or len(optimizers) != 1:
            raise PreparationError(
                f"prepare() got {len(models)} models and {len(optimizers)} optimizers. With fp8 by MS-AMP, give it one "
                "model and its optimizer together: MS-AMP makes both at once. For several models, use torchao "
                "(AORecipeKwargs())."
            )
        msamp: Any = require("msamp", purpose="fp8 by MS-AMP")
        made: list[torch.optim.Optimizer] = []

        def convert(model: torch.nn.Module) -> torch.nn.Module:
            model, optimizer = msamp.initialize(model.to(self._device_type), optimizers[0], opt_level=self._level)
            made.append(optimizer)
            return model

        model, report = report_conversion(models[0], "fp8 by MS-AMP", convert, _why_stays, _is_converted)
        self.record(report)
        return [model], made


def _is_converted(module: torch.nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "msamp"


def _why_stays(name: str, module: torch.nn.Module) -> str:
    del name
    return HOLDS_OTHERS if next(module.children(), None) is not None else OTHER_KIND
