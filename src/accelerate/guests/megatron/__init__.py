"""Megatron-LM as a strategy; never run against the real engine. Internal."""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
