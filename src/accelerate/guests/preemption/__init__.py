"""Preemption: after a signal or a notice to one rank, all ranks save at one step, and the run ends. Internal.

- `policy`: what is a notice, and how the run ends then; the public class.
- `notices`: signals, a file and an address, as one source of notices.
- `agreement`: the step at which all ranks stop.
- `loop`: the places of a loop at which it may stop.
"""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
