"""Launch on TPUs: the devices of this host, or of a pod; and ``accelerate tpu-config``."""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "tpu-config",
            f"{__name__}.tpu_command",
            "tpu_command_parser",
            "Run set-up commands on every machine of a TPU pod.",
        ),
    ),
    engines=(f"{__name__}.launcher:Tpu",),
)
