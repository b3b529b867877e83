"""Import path kept for compatibility: rich, for tracebacks."""

from __future__ import annotations

from ..logging import install_rich_tracebacks

__all__ = ["install_rich_tracebacks"]
