"""Import path kept: averaging of replicas, which is a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .lazy import names_from

if TYPE_CHECKING:
    from .guests.diloco.local_sgd import LocalSGD

__all__ = ["LocalSGD"]

__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", {"guests.diloco.local_sgd": "LocalSGD"})
