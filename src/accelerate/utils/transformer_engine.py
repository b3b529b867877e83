"""Import path kept for compatibility: Transformer Engine's fp8."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
