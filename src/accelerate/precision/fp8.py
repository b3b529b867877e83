"""Which package does fp8 arithmetic, and what the ways of doing it share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from ..errors import MissingDependency, SettingError
from ..logging import get_logger
from ..optional import is_msamp_available, is_torchao_available, is_transformer_engine_available
from .autocast import Autocasting
from .conversion import ConversionReport

logger = get_logger(__name__)

#: Looks a converting function up by its documented name.
Fp8Functions = Callable[[str], Any]

#: The word of the interface, the package, whether it is there: the order in which they are asked.
_BACKENDS: Final[tuple[tuple[str, str, Callable[[], bool]], ...]] = (
    ("AO", "torchao", is_torchao_available),
    ("TE", "transformer_engine", is_transformer_engine_available),
    ("MSAMP", "msamp", is_msamp_available),
)
BACKEND_WORDS: Final = tuple(word for word, _, _ in _BACKENDS)


@final
@dataclass
class Fp8Request:
    """What the user said about fp8.

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
    """AO, TE or MSAMP: of the recipe that was given, else as asked for, else the first that is installed.

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
    """The package that a backend's word stands for."""
    return next(package for word, package, _ in _BACKENDS if word == backend)


class Fp8Precision(Autocasting, ABC):
    """Some layers in fp8, everything else under autocast in bf16; keeps a report of every conversion."""

    def __init__(self, device_type: str, scaler: Any = None, handler: Any = None) -> None:
        super().__init__(torch.bfloat16, device_type, scaler, handler)
        self.reports: Sequence[ConversionReport] = ()

    @property
    def label(self) -> str:
        """fp8."""
        return "fp8"

    def record(self, report: ConversionReport) -> None:
        """``report`` is kept, and the main process has said which modules were converted.

        Aloud where layers stayed for their size, or all of them.
        """
        self.reports = [*self.reports, report]
        log = logger.info if report.converted and not _has_surprise(report) else logger.warning
        log("%s. print(accelerator.conversions[-1]) lists every module.", report.summary)


def _has_surprise(report: ConversionReport) -> bool:
    return any("multiple" in module.reason for module in report.kept)
