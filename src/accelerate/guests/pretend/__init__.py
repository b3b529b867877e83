"""Simulate one rank of a large job: run a script without tensor values, and report the rank's work."""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest(engines=(f"{__name__}.engine:PretendedRank",))
