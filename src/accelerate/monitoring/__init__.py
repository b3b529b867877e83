"""Monitor a run: its numbers, its callbacks, the rules that stop it, and the files that ``accelerate monitor`` reads.

- `run_monitor`: the run's monitor, which ``Accelerator.watch_run`` makes, its callbacks, and rules for losses.
- `loop_watch`: the same for a script that doesn't ask for it, by `accelerate launch --monitor`.
- `throughput`: rates, waiting times and reports; `records`: the file that each rank writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from .loop_watch import LoopWatch, watch_loop
    from .run_monitor import (
        LossRules,
        RunCallback,
        RunWatch,
        after_load,
        after_save,
        before_save,
        folder_of,
        note_norm,
        watch,
    )
    from .throughput import Flops, StepReport, count_flops

__all__ = [
    "Flops",
    "LoopWatch",
    "LossRules",
    "RunCallback",
    "RunWatch",
    "StepReport",
    "after_load",
    "after_save",
    "before_save",
    "count_flops",
    "folder_of",
    "watch_loop",
    "note_norm",
    "watch",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate",
    {
        "monitoring.throughput": "Flops StepReport count_flops",
        "monitoring.run_monitor": (
            "RunCallback LossRules RunWatch after_load after_save before_save folder_of note_norm watch"
        ),
        "monitoring.loop_watch": "LoopWatch watch_loop",
    },
)
