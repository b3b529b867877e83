"""Preemption: after a signal or a notice to one rank, all ranks save at one step, and the run ends. Internal.

- `policy`: what is a notice, and how the run ends then; the public class.
- `notices`: signals, a file and an address, as one source of notices.
- `agreement`: the step at which all ranks stop.
- `loop`: the places of a loop at which it may stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...settings.preemption import PreemptionOptions

GUEST: Final = Guest(runs=(f"{__name__}:attach",))


def attach(run: Accelerator, asked: PreemptionOptions | None) -> LoopHook | None:
    """Return the hook by which ``run`` stops after a notice; None where nothing asked for it.

    Args:
        asked: the policy that the Accelerator was given, or the launcher's options.
    """
    if asked is None:
        return None
    from .loop import attach

    return attach(run, asked)
