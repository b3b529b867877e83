"""Import path kept for compatibility: torch_xla in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from ..guests.xla.launcher import install_xla


__all__ = ["install_xla"]

__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", {"guests.xla.launcher": "install_xla"})
