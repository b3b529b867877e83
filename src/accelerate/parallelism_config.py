"""Import path kept for compatibility: how a run is spread over the axes of a mesh."""

from __future__ import annotations

from .plugins.parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]
