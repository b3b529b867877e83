"""Import path kept for compatibility: names of files and options that are part of the interface."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
