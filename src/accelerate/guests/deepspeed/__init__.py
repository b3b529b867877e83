"""DeepSpeed: its strategy, the plugin for its options, and its launcher for the hosts of a hostfile."""

from __future__ import annotations

from typing import Final

from ...seams import Candidate, Guest

GUEST: Final = Guest(
    engines=(f"{__name__}.launcher:DeepSpeedLauncher",),
    strategies=(
        Candidate(f"{__name__}.strategy", "DeepSpeed", lambda settings, world: settings.deepspeed is not None),
    ),
    settings=f"{__name__}.options:GROUPS",
)
