"""Megatron-LM as a strategy; tested with a stand-in, untested with the engine itself. Internal."""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
