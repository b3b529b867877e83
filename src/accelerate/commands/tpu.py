"""Import path kept for compatibility: the command ``accelerate tpu-config``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from ..guests.xla.tpu_command import main, tpu_command_launcher, tpu_command_parser

__all__ = ["main", "tpu_command_launcher", "tpu_command_parser"]

__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", {"guests.xla.tpu_command": " ".join(__all__)})

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
