"""XLA devices: their strategy, the launcher for TPUs, and ``accelerate tpu-config``."""

from __future__ import annotations

from typing import Final

from ...seams import Candidate, Command, Guest

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
    # Devices whose runtime connects its processes itself.
    strategies=(Candidate(f"{__name__}.strategy", "XlaDevices", lambda settings, world: bool(world.kind.runtime)),),
)
