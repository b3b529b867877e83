"""The strategy for Megatron-LM; tested with a dummy, untested with the engine itself. Internal."""

from __future__ import annotations

from typing import Final

from ...seams import Candidate, Guest

GUEST: Final = Guest(
    strategies=(Candidate(f"{__name__}.strategy", "Megatron", lambda settings, world: settings.megatron is not None),),
    settings=f"{__name__}.options:GROUPS",
)
