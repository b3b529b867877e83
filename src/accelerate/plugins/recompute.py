"""The options of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import SettingError
from ..settings.training import RecomputeOptions
from .handlers import KwargsHandler, canonicalize

#: (torch's SelectiveCheckpointContext, operator, its arguments) -> torch's CheckpointPolicy for the result.
SavePolicy: TypeAlias = Callable[..., Any]


@dataclass(repr=False, eq=False)
class ActivationCheckpointing(RecomputeOptions, KwargsHandler):
    """Activation checkpointing: the modules to recompute in the backward pass, and the results to keep.

    ``modules`` is a regular expression for full module names, or a list of modules, classes and class names; None
    chooses FSDP's wrap units, or the repeated blocks of the model. ``save_ops`` lists operators whose results are kept
    ("mm", "sdpa", "conv", names like "aten.mm", or operators), or is a policy function for torch's
    ``create_selective_checkpoint_contexts``.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self, "offload")
        if isinstance(self.save_ops, str):
            raise SettingError(
                f"ActivationCheckpointing(save_ops={self.save_ops!r}): give a list of names, as ({self.save_ops!r},)."
            )
        if isinstance(self.modules, (list, tuple, set)) and not self.modules:
            raise SettingError("ActivationCheckpointing(modules=[]) chooses no module: leave it out, or name some.")
