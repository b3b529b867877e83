"""Shell completion of the command ``accelerate``."""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "completion",
            f"{__name__}.command:completion_command_parser",
            "Print a script that lets bash, zsh or fish complete this command.",
        ),
    )
)
