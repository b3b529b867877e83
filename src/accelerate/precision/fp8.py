"""Choose the package for fp8 arithmetic; the base class of fp8 precisions."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import torch

from ..errors import MissingDependency, NotBuilt, SettingError
from ..logging import MultiProcessAdapter, get_logger
from ..optional import is_torchao_available, is_transformer_engine_available
from ..settings.fp8 import MSAMP_IS_GONE
from .base import Autocasting, ConversionReport

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs

logger: MultiProcessAdapter = get_logger(__name__)

#: Looks a converting function up by its documented name.
Fp8Functions = Callable[[str], Any]

#: The interface's name of a backend, its package, whether it is installed; in the order of preference.
_BACKENDS: Final[tuple[tuple[str, str, Callable[[], bool]], ...]] = (
    ("AO", "torchao", is_torchao_available),
    ("TE", "transformer_engine", is_transformer_engine_available),
)
#: The sizes of 8-bit matrices have to be multiples of this.
MULTIPLE: Final = 16
BACKEND_WORDS: Final = tuple(word for word, _, _ in _BACKENDS)


@final
@dataclass
class Fp8Request:
    """The user's settings for fp8.

    Args:
        backend: AO, TE, or NO for the first one that is installed; ``source`` says where it was set.
        recipes: the recipes given to the constructor, by backend.
        functions: returns a conversion function by name.
        gathers: whether ``fully_shard`` gathers parameters for each use.
    """

    backend: str
    source: str
    functions: Fp8Functions
    recipes: dict[str, Any] = field(default_factory=dict)
    gathers: bool = False


def choose_backend(request: Fp8Request) -> str:
    """Return AO or TE: the given recipe's backend, else the requested one, else the first installed one.

    Raises:
        SettingError: recipes for two backends were given.
        NotBuilt: MS-AMP was requested.
        MissingDependency: the requested backend isn't installed, or none is.
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
                "mixed_precision='fp8' needs torchao or transformer-engine, and neither is installed. Install one "
                "(pip install \"accelerate[fp8]\" brings torchao), or use mixed_precision='bf16'."
            )
        return chosen
    source = "the recipe in kwargs_handlers" if request.recipes else request.source
    if chosen == "MSAMP":
        raise NotBuilt(f"{source} asks for fp8 by MS-AMP, {MSAMP_IS_GONE}")
    for word, package, is_there in _BACKENDS:
        if word == chosen and not is_there():
            raise MissingDependency(
                f"{source} asks for fp8 by {package}, which isn't installed. Install it, choose another backend "
                f"({', '.join(other for other in BACKEND_WORDS if other != word)}), or use mixed_precision='bf16'."
            )
    return chosen


def package_of(backend: str) -> str:
    """Return the package name of a backend."""
    return next(package for word, package, _ in _BACKENDS if word == backend)


class Fp8Precision(Autocasting, ABC):
    """A precision with some layers in fp8 and everything else under autocast in bf16; it reports every conversion."""

    def __init__(
        self, device_type: str, scaler: torch.amp.GradScaler | None = None, handler: AutocastKwargs | None = None
    ) -> None:
        super().__init__("fp8", device_type, scaler, handler)
        self.reports: Sequence[ConversionReport] = ()

    def record(self, report: ConversionReport) -> None:
        """Keep ``report``, and log on the main process which modules were converted.

        The log is a warning if layers were kept because of their size, or if none was converted.
        """
        self.reports = [*self.reports, report]
        is_surprise = not report.converted or any("multiple" in module.reason for module in report.kept)
        log = logger.warning if is_surprise else logger.info
        log("%s. print(accelerator.conversions[-1]) lists every module.", report.summary)


def why_linear_stays(module: torch.nn.Linear) -> str:
    """Return why the sizes of ``module`` don't allow fp8; empty if they do."""
    shape = (module.in_features, module.out_features)
    return f"{shape[0]} x {shape[1]}: not both multiples of {MULTIPLE}" if any(s % MULTIPLE for s in shape) else ""
