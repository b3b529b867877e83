"""XLA devices: their strategy, the launcher for TPUs, and ``accelerate tpu-config``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Candidate, Command, Guest

if TYPE_CHECKING:
    from ...accelerator import Accelerator

GUEST: Final = Guest(
    commands=(
        Command(
            "tpu-config",
            f"{__name__}.tpu_command:tpu_command_parser",
            "Run set-up commands on every machine of a TPU pod.",
        ),
    ),
    engines=(f"{__name__}.launcher:Tpu",),
    runs=(f"{__name__}:attach",),
    # Devices whose runtime connects its processes itself.
    strategies=(Candidate(f"{__name__}.strategy", "XlaDevices", lambda settings, world: bool(world.kind.runtime)),),
)


def attach(run: Accelerator, asked: object) -> None:
    """Make XLA cast all tensors of ``run`` if that is how its devices compute in bf16."""
    if run.world.kind.runtime:
        from .strategy import XlaDevices, cast_everything

        if isinstance(run.strategy, XlaDevices):
            cast_everything(run)
