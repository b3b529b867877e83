"""The live view of a run, from the files in its folder.

- `reading`: the files of a run, followed while they grow; `snapshot`: the run as it is now, as one `document`.
- `serve`: the page; `terminal`: the same as text; `export`: the page as a file or a picture.
"""

from __future__ import annotations

from typing import Final

from ...seams import Command, Guest, LaunchFlag

GUEST: Final = Guest(
    commands=(
        Command(
            "monitor",
            f"{__name__}.command",
            "monitor_command_parser",
            "Show a run while it goes on: a live page, or the terminal.",
        ),
        Command(
            "report",
            f"{__name__}.report_command",
            "report_command_parser",
            "Say where the hours of a run went, over all its restarts.",
        ),
    ),
    launch_flags=(LaunchFlag("--monitor", "Show the run on a page; kept in runs/.", f"{__name__}.launch_page:begin"),),
)
