"""Import path kept for compatibility: the processes of a run."""

from __future__ import annotations

from .distributed.world import World, current_world

__all__ = ["World", "current_world"]
