"""What became of every module of a model that was converted for low-precision arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True)
class ConvertedModule:
    """One module: its name, its class before, its class now, and why it stayed where it did."""

    name: str
    kind: str
    became: str
    reason: str = ""

    @property
    def is_converted(self) -> bool:
        """Whether it computes in the low precision now."""
        return not self.reason


@final
@dataclass(frozen=True)
class ConversionReport:
    """All modules of one model, in its own order. As text: a table, and how many were converted.

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
        """The modules that compute as before, each with its reason."""
        return tuple(module for module in self.modules if not module.is_converted)

    @property
    def summary(self) -> str:
        """One line: how many modules were converted, and why layers that could have been were not."""
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
    """``convert(model)``, and what became of its modules: all of them, by comparison of before and after.

    Args:
        why_not: why a module of that name stayed, asked about the module as it was before.
        is_converted: whether a module is one that the backend makes.
    """
    before = dict(model.named_modules())
    kinds = {name: type(module).__name__ for name, module in before.items()}
    # Asked before: converting changes modules in place, and what a reason looks at with them.
    reasons = {name: why_not(name, module) for name, module in before.items()}
    model = convert(model)
    modules = tuple(_fates(model, kinds, reasons, is_converted))
    return model, ConversionReport(type(model).__name__, backend, modules)


def _fates(
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
