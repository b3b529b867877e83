"""Go back in a run: find the update and the part of it that something began with, and open a run at an update.

- `rerun`: start a recorded script again from a checkpoint, in processes of its own; `child`: one rank of them.
- `observe`: what is recorded of each update; `updates`: what stands out in one, or differs between two runs.
- `run_folder`: a run's log and checkpoints, and the condition to look for.
- `search`, `bisect_command`: `accelerate bisect`.
- `position`, `replay_command`: `accelerate replay`.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest

GUEST: Final = Guest(
    commands=(
        Command(
            "bisect",
            f"{__name__}.bisect_command:bisect_command_parser",
            "Find the update, samples and module with which something in a run began.",
        ),
        Command(
            "replay",
            f"{__name__}.replay_command:replay_command_parser",
            "Open a run at one of its updates, or try it on from there.",
        ),
    ),
    functions={"rerun": f"{__name__}.rerun:rerun"},
)
