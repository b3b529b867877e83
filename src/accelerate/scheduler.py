"""Import path kept for compatibility: the prepared scheduler."""

from __future__ import annotations

from .training.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
