"""What torch.compile is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings.compile import DynamoOptions
from ..settings.env import fill_unset
from ..settings.labels import DynamoBackend
from .base import KwargsHandler, settle


@dataclass
class TorchDynamoPlugin(DynamoOptions, KwargsHandler):
    """Arguments of ``torch.compile``, and whether a model is compiled whole or by its repeated blocks.

    ``backend="no"``, the default, compiles nothing.
    """

    def __post_init__(self) -> None:
        fill_unset(self)
        settle(self, "backend")
        self.backend = DynamoBackend(self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, the backend spelled as torch spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments for ``torch.compile`` that differ from its defaults."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs
