"""The command ``accelerate`` under its documented module name: ``python -m accelerate.commands.accelerate_cli``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..lazy import names_from
from .config import get_config_parser
from .env import env_command_parser
from .launch import launch_command_parser
from .main import main
from .merge import merge_command_parser
from .test import test_command_parser
from .to_fsdp2 import to_fsdp2_command_parser

__all__ = [
    "env_command_parser",
    "get_config_parser",
    "launch_command_parser",
    "main",
    "merge_command_parser",
    "test_command_parser",
    "to_fsdp2_command_parser",
]

#: Of guests, which may not be there.
__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate",
    {"guests.estimate.command": "estimate_command_parser", "guests.xla.tpu_command": "tpu_command_parser"},
)

if __name__ == "__main__":
    sys.exit(main())
