"""Import path kept for compatibility: the command ``accelerate tpu-config``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..lazy import names_from

__getattr__: Callable[[str], Any] = names_from(
    __name__, "accelerate", {"guests.xla.tpu_command": "main tpu_command_launcher tpu_command_parser"}
)

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
