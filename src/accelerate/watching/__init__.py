"""Watching a run: its numbers, its callbacks, the rules that stop it, and the files that ``accelerate monitor`` reads.

- `run`: the watch itself, which ``Accelerator.watch_run`` makes; `callbacks`: what users may do at its moments.
- `rules`: when a loss says that a run is lost; `records`: what each rank writes down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import names_from

if TYPE_CHECKING:
    from ..health.throughput import Flops, StepReport, count_flops
    from .callbacks import RunCallback
    from .rules import LossRules
    from .run import RunWatch, after_load, before_save, folder_of

__all__ = [
    "Flops",
    "LossRules",
    "RunCallback",
    "RunWatch",
    "StepReport",
    "after_load",
    "before_save",
    "count_flops",
    "folder_of",
]

__getattr__ = names_from(
    __name__,
    "accelerate",
    {
        "health.throughput": "Flops StepReport count_flops",
        "watching.callbacks": "RunCallback",
        "watching.rules": "LossRules",
        "watching.run": "RunWatch after_load before_save folder_of",
    },
)
