"""A run that goes on when ranks are lost, without a restart: `accelerate launch --keep_replicas`. Internal."""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest()
