"""Import path kept for compatibility: the layouts of a training step over ranks."""

from __future__ import annotations

from ..guests.estimate.plan import Layout, footprint

__all__ = ["Layout", "footprint"]
