"""The record of a run, and ``accelerate reproduce``, which runs it again and compares.

- `recording`: the hooks that write the record, and fingerprints: short texts that stand for the bits of tensors.
- `surroundings`: the facts of a launch.
- `chain`: the file of the record, in which each entry holds the hash of the one before.
- `masking`: what is never recorded.
- `runs`: the entries as runs, and why two launches differ; `again`: run it again; `command`: the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Command, Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator


def attach(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook that begins the record of ``run``; None without a folder on a disk, or off the main process."""
    folder = run.project_configuration.project_dir
    if not folder or "://" in str(folder) or not run.world.is_main or run.world.members is not None:
        return None
    from .recording import Beginning

    return Beginning(run)


GUEST: Final = Guest(
    commands=(
        Command(
            "reproduce",
            f"{__name__}.command:reproduce_command_parser",
            "Run a recorded run again, and say whether it is equal.",
        ),
    ),
    runs=(f"{__name__}:attach",),
    functions={"masked_arguments": f"{__name__}.masking:masked_arguments"},
)
