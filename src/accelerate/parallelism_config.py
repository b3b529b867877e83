"""Import path kept for compatibility: the sizes of the parallelism axes of a run."""

from __future__ import annotations

from .plugins.parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]
