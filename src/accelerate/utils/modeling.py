"""Old address: models larger than one device."""

from __future__ import annotations

from ..memory import clear_device_cache

__all__ = ["clear_device_cache"]
