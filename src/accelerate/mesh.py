"""The mesh of the parallelism axes, and the processes that it lies over."""

from __future__ import annotations

from .distributed.mesh import Mesh
from .distributed.world import World, current_world

__all__ = ["Mesh", "World", "current_world"]
