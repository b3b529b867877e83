"""The base class of precisions: hooks that a precision may override."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, final

import torch

from ..nested import convert_to_fp32
from ..torch_private.modules import has_scaled_gradients

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs

P = ParamSpec("P")
T = TypeVar("T")


class Precision(ABC):
    """The dtypes in which a model computes. Every hook does nothing unless a precision overrides it."""

    #: The gradient scaler, if the precision needs one; callers may assign another.
    scaler: torch.amp.GradScaler | None = None
    #: Whether forward passes run under autocast; callers may switch it off.
    is_autocast: bool = False
    #: The AutocastKwargs, if given.
    handler: AutocastKwargs | None = None

    #: One report for each converted model; a precision that converts has its own list.
    reports: Sequence[ConversionReport] = ()
    #: The package that converts, by its name in the interface (AO, TE).
    backend: str | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The name in the interface: no, fp16, bf16, fp8."""

    def check(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise if the new models and optimizers of one ``prepare`` call have to be converted together and aren't."""

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the modules or weights of ``model`` for this precision; called first in ``place``."""
        return model

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` compute in this precision."""

    def patch_wrapped(self, model: torch.nn.Module) -> None:
        """Make the forward of a wrapped ``model`` (DDP, FSDP) compute in this precision."""

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Undo :meth:`patch_forward`."""

    def follow(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Register the work at each update of prepared ``models``; called last in ``prepare``."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Enter a context in which operations run in this precision."""
        return nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per accumulation window."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        # GradScaler raises on a second unscale_, but a loop may clip twice, or clip two models.
        if has_scaled_gradients(scaler, optimizer):
            scaler.unscale_(optimizer)


@final
class FullPrecision(Precision):
    """The precision of a model that computes in the dtypes of its parameters."""

    @property
    def label(self) -> str:
        """The name: no."""
        return "no"


# --------------------------------------------------------------------------------------------------
# Half-precision outputs converted to float32, so that losses and metrics are computed in full precision


class ConvertOutputsToFp32:
    """A forward whose half-precision outputs are converted to float32."""

    def __init__(self, model_forward: Callable[..., object]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A forward prepared for mixed precision can't be pickled. Pickle the model itself, after "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``model_forward`` in a function that converts half-precision outputs to float32."""
    converter = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> T:
        return converter(*args, **kwargs)

    return forward


# --------------------------------------------------------------------------------------------------
# Reports of conversions for low-precision arithmetic


@final
@dataclass(frozen=True)
class ConvertedModule:
    """One module of a conversion: its name, its class before and after, and the reason if it was kept."""

    name: str
    kind: str
    became: str
    reason: str = ""

    @property
    def is_converted(self) -> bool:
        """Whether the module now computes in the low precision."""
        return not self.reason


@final
@dataclass(frozen=True)
class ConversionReport:
    """The modules of one converted model in their order. Its text is a table with a summary.

    Args:
        model: the class of the model.
        backend: the package that converted it.
    """

    model: str
    backend: str
    modules: tuple[ConvertedModule, ...]

    @property
    def converted(self) -> tuple[ConvertedModule, ...]:
        """The modules that compute in the low precision."""
        return tuple(module for module in self.modules if module.is_converted)

    @property
    def kept(self) -> tuple[ConvertedModule, ...]:
        """The modules that weren't converted, each with its reason."""
        return tuple(module for module in self.modules if not module.is_converted)

    @property
    def summary(self) -> str:
        """The number of converted modules, and why convertible layers were kept, in one line."""
        reasons = Counter(module.reason for module in self.kept if module.reason not in (OTHER_KIND, HOLDS_OTHERS))
        kept = "; ".join(f"{count} kept: {reason}" for reason, count in reasons.items())
        line = f"{self.backend}: {len(self.converted)} of {len(self.modules)} modules of {self.model} converted"
        return f"{line} ({kept})" if kept else line

    def __str__(self) -> str:
        width = max((len(module.name) for module in self.modules), default=0)
        rows = [
            f"  {module.name:<{width}}  {module.kind}" + (f" -> {module.became}" if module.is_converted else "")
            + (f"  ({module.reason})" if module.reason else "")
            for module in self.modules
        ]  # fmt: skip
        return "\n".join([self.summary, *rows])


OTHER_KIND = "not a kind of layer that is converted"
HOLDS_OTHERS = "holds other modules"


def report_conversion(
    model: torch.nn.Module,
    backend: str,
    convert: Callable[[torch.nn.Module], torch.nn.Module],
    why_not: Callable[[str, torch.nn.Module], str],
    is_converted: Callable[[torch.nn.Module], bool],
) -> tuple[torch.nn.Module, ConversionReport]:
    """Return ``convert(model)`` and a report that compares all modules before and after.

    Args:
        why_not: returns why the module of that name isn't converted; called before the conversion.
        is_converted: returns whether a module is one of the backend's.
    """
    before = dict(model.named_modules())
    kinds = {name: type(module).__name__ for name, module in before.items()}
    # Ask before converting, which changes modules in place and so the answers.
    reasons = {name: why_not(name, module) for name, module in before.items()}
    model = convert(model)
    modules = tuple(_module_reports(model, kinds, reasons, is_converted))
    return model, ConversionReport(type(model).__name__, backend, modules)


def _module_reports(
    model: torch.nn.Module,
    kinds: dict[str, str],
    reasons: dict[str, str],
    is_converted: Callable[[torch.nn.Module], bool],
) -> Iterator[ConvertedModule]:
    for name, module in model.named_modules():
        became = type(module).__name__
        kind = kinds.get(name, became)  # a module that converting has added
        if is_converted(module):
            yield ConvertedModule(name, kind, became)
        else:
            yield ConvertedModule(name, kind, became, reasons.get(name) or OTHER_KIND)
