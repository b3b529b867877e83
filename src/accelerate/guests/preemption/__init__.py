"""Preemption: after a signal or a notice to one rank, all ranks save at one step and the run ends. Internal.

- `policy`: the public class that selects the notices, and how the run ends.
- `notices`: signals, a file and a URL, as one source of notices.
- `agreement`: the agreement on the step at which all ranks stop.
- `loop`: the points of a loop at which it may stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...settings.preemption import PreemptionOptions

GUEST: Final = Guest(runs=(f"{__name__}:attach",))


def attach(run: Accelerator, asked: PreemptionOptions | None) -> LoopHook | None:
    """Return the hook that stops ``run`` after a notice; None if no policy was given.

    Args:
        asked: the policy given to the Accelerator, or the launcher's options.
    """
    if asked is None:
        return None
    from .loop import attach

    return attach(run, asked)
