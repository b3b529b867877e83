"""DeepSpeed's own launcher, which starts the processes of all hosts of a hostfile."""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest(engines=(f"{__name__}.launcher:DeepSpeedLauncher",))
