"""Import path kept for compatibility: torch_xla in a notebook."""

from __future__ import annotations

from ..guests.xla.launcher import install_xla

__all__ = ["install_xla"]
