"""Prepared loaders: sharding over ranks, padding and valid rows, resume positions, prefetch, gathering of results."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
