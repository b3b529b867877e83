"""Tools that read a training script: convert it, check it, and compare its runs.

- `migrate`: turns a raw PyTorch script into an accelerated one; `migrate_command`.
- `doctor`: what an accelerated script does otherwise on several processes; `doctor_command`.
- `verify`: runs of a script, or of two, compared update by update.
- `options`: what their commands have in common.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "migrate",
            f"{__name__}.migrate_command",
            "migrate_command_parser",
            "Turn a raw PyTorch script into one for any number of processes.",
        ),
        Command(
            "doctor",
            f"{__name__}.doctor_command",
            "doctor_command_parser",
            "Say what an accelerated script does otherwise on several processes.",
        ),
    )
)
