"""Import path kept for compatibility: operations on nested tensors, and collectives over them."""

from __future__ import annotations

from ..lazy import names_of_stub

__getattr__, __dir__ = names_of_stub(__name__)
