"""Import path kept for compatibility: the mesh of the parallelism axes."""

from __future__ import annotations

from .distributed.mesh import Mesh

__all__ = ["Mesh"]
