"""Monitor a run: its numbers, its callbacks, its stopping rules, and the files for ``accelerate monitor``.

- `run_monitor`: the run's monitor, which ``Accelerator.watch_run`` makes, its callbacks, and rules for losses.
- `loop_watch`: the same for a script that doesn't ask for it, by `accelerate launch --monitor`.
- `throughput`: rates, waiting times and reports; `records`: the file that each rank writes.
- `utilization`: how busy a rank's device is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..guests.monitor.records import FOLDER_VARIABLE
from ..lazy import names_from
from ..settings import env

if TYPE_CHECKING:
    import torch

    from ..guests.monitor.loop_watch import LoopWatch
    from ..guests.monitor.run_monitor import (
        LossRules,
        RunCallback,
        RunWatch,
        WatchedRun,
        after_load,
        after_save,
        before_save,
        folder_of,
        watch,
        watch_and_check,
    )
    from ..guests.monitor.throughput import Flops, StepReport, count_flops

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
    "watch_and_check",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate",
    {
        "guests.monitor.throughput": "Flops StepReport count_flops",
        "guests.monitor.run_monitor": "RunCallback LossRules RunWatch after_load after_save before_save folder_of watch "
        "watch_and_check",
        "guests.monitor.loop_watch": "LoopWatch",
    },
)


def watch_loop(run: WatchedRun, optimizers: Sequence[torch.optim.Optimizer]) -> LoopWatch | None:
    """Return the watch of the run's loop if the launch was asked for one, else None, and then import nothing."""
    if not env.read(FOLDER_VARIABLE):
        return None
    from ..guests.monitor.loop_watch import LoopWatch

    return LoopWatch(run, optimizers)


def note_norm(run: RunWatch | None, norm: torch.Tensor) -> torch.Tensor:
    """Return ``norm``, after telling the watch, if there is one; where there is none, nothing is imported."""
    if run is not None:
        run.note_gradient_norm(norm)
    return norm
