"""Utilities for tests, here and in packages on top; and the scripts that `accelerate test` runs."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
