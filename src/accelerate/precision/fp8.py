"""Choose the package for fp8 arithmetic; the base class of fp8 precisions, and MS-AMP's."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import MissingDependency, PreparationError, SettingError
from ..logging import get_logger
from ..optional import is_msamp_available, is_torchao_available, is_transformer_engine_available, require
from .autocast import Autocasting
from .base import HOLDS_OTHERS, OTHER_KIND, ConversionReport, report_conversion

logger = get_logger(__name__)

#: Looks a converting function up by its documented name.
Fp8Functions = Callable[[str], Any]

#: The interface's name of a backend, its package, whether it is installed; in the order of preference.
_BACKENDS: Final[tuple[tuple[str, str, Callable[[], bool]], ...]] = (
    ("AO", "torchao", is_torchao_available),
    ("TE", "transformer_engine", is_transformer_engine_available),
    ("MSAMP", "msamp", is_msamp_available),
)
BACKEND_WORDS: Final = tuple(word for word, _, _ in _BACKENDS)


@final
@dataclass
class Fp8Request:
    """The user's settings for fp8.

    Args:
        backend: AO, TE, MSAMP, or NO for the first one that is installed; ``source`` says where that came from.
        recipes: the recipe of the constructor by backend, where one was given.
        functions: looks up the functions that convert, by name.
        gathers: whether parameters are gathered for each use, by ``fully_shard``.
    """

    backend: str
    source: str
    functions: Fp8Functions
    recipes: dict[str, Any] = field(default_factory=dict)
    gathers: bool = False


def choose_backend(request: Fp8Request) -> str:
    """Return AO, TE or MSAMP: that of the given recipe, else the one asked for, else the first that is installed.

    Raises:
        SettingError: recipes for two backends.
        MissingDependency: the backend isn't installed, or none is.
    """
    if len(request.recipes) > 1:
        raise SettingError(
            f"kwargs_handlers has recipes for several fp8 backends ({', '.join(sorted(request.recipes))}). Keep one."
        )
    chosen = next(iter(request.recipes), request.backend)
    if chosen == "NO":
        chosen = next((word for word, _, is_there in _BACKENDS if is_there()), "NO")
        if chosen == "NO":
            raise MissingDependency(
                "mixed_precision='fp8' needs torchao, transformer-engine or MS-AMP, and none of them is installed. "
                "Install one (pip install \"accelerate[fp8]\" brings torchao), or use mixed_precision='bf16'."
            )
        return chosen
    source = "the recipe in kwargs_handlers" if request.recipes else request.source
    for word, package, is_there in _BACKENDS:
        if word == chosen and not is_there():
            raise MissingDependency(
                f"{source} asks for fp8 by {package}, which isn't installed. Install it, choose another backend "
                f"({', '.join(other for other in BACKEND_WORDS if other != word)}), or use mixed_precision='bf16'."
            )
    return chosen


def package_of(backend: str) -> str:
    """Return the package of a backend."""
    return next(package for word, package, _ in _BACKENDS if word == backend)


class Fp8Precision(Autocasting, ABC):
    """A precision with some layers in fp8, everything else under autocast in bf16; it keeps a report of every
    conversion.
    """

    def __init__(self, device_type: str, scaler: Any = None, handler: Any = None) -> None:
        super().__init__(torch.bfloat16, device_type, scaler, handler)
        self.reports: Sequence[ConversionReport] = ()

    @property
    def label(self) -> str:
        """fp8."""
        return "fp8"

    def record(self, report: ConversionReport) -> None:
        """Keep ``report``, and log on the main process which modules were converted.

        Aloud where layers stayed for their size, or all of them.
        """
        self.reports = [*self.reports, report]
        log = logger.info if report.converted and not _has_surprise(report) else logger.warning
        log("%s. print(accelerator.conversions[-1]) lists every module.", report.summary)


def _has_surprise(report: ConversionReport) -> bool:
    return any("multiple" in module.reason for module in report.kept)


# --------------------------------------------------------------------------------------------------
# fp8 by MS-AMP: weights, gradients and optimizer states in 8-bit floats. The package is no longer developed


@final
class MsampPrecision(Fp8Precision):
    """The precision fp8 by MS-AMP's layers and optimizer; everything else runs under autocast in bf16, with a gradient
    scaler.

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
        """Convert the model and its optimizer by MS-AMP, and move the model to its device.

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
