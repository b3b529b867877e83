"""Import path kept for compatibility: parsers whose options can be spelled with ``_`` and with ``-``."""

from __future__ import annotations

from .parser import CustomArgumentParser

__all__ = ["CustomArgumentParser"]
