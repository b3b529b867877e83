"""Import path kept for compatibility: the progress bar."""

from __future__ import annotations

from ..progress import tqdm

__all__ = ["tqdm"]
