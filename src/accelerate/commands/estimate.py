"""Import path kept for compatibility: the command ``accelerate estimate-memory``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from ..guests.estimate.command import (
        add_timm_hub_prefix,
        check_has_model,
        create_ascii_table,
        create_empty_model,
        estimate_command,
        estimate_command_parser,
        estimate_training_usage,
        gather_data,
        main,
        verify_on_hub,
    )

__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
]

__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", {"guests.estimate.command": " ".join(__all__)})

if __name__ == "__main__":
    sys.exit(__getattr__("main")())
