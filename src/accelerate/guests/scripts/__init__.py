"""Tools that read a training script: convert it, check it, and compare its runs.

- `migrate`: convert a plain PyTorch script to use the Accelerator; `migrate_command`.
- `doctor`: find how an accelerated script behaves differently on several processes; `doctor_command`.
- `verify`: compare runs of a script, or of two, update by update; `verify_command`.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "migrate",
            f"{__name__}.migrate_command:migrate_command_parser",
            "Turn a raw PyTorch script into one for any number of processes.",
        ),
        Command(
            "doctor",
            f"{__name__}.doctor_command:doctor_command_parser",
            "Report what an accelerated script does differently on several processes.",
        ),
        Command(
            "verify",
            f"{__name__}.verify_command:verify_command_parser",
            "Train some updates in several layouts, and say what differs from one process.",
        ),
    ),
    functions={
        "keep_files": f"{__name__}.verify.kept_files:keep_files",
        "main_program": f"{__name__}.verify.wrapping:main_program",
        "end_with_others": f"{__name__}.verify.wrapping:end_with_others",
    },
)
