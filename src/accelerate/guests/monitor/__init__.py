"""The monitor of a run: its reports, its stopping rules, and the live view of the files that it writes.

- `run_monitor`: the monitor of ``Accelerator.watch_run``; `throughput`: its measurements.
- `loop_watch`: a monitor for scripts without ``watch_run``, with `accelerate launch --monitor`.
- `records`: the file of each rank; `ledger`: how a process spent its time; `hours`: the same of a whole run.
- `reading`: read the files of a run as they grow; `snapshot`: the current state of the run as one `document`.
- `runs`: the runs of a folder.
- `serve`: the web page; `terminal`: the same as text; `export`: the page as a file or a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

from ...seams import Command, Guest, LaunchFlag, LoopHook
from ...settings import env

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...watching import RunWatch
    from .run_monitor import Loaded


#: The folder of the run's files, whatever the script says; `accelerate launch --monitor` sets it.
_FOLDER_VARIABLE: Final = "ACCELERATE_MONITOR"


@final
class LastLoad(LoopHook):
    """The last loaded checkpoint; a watch started later continues from it."""

    def __init__(self, run: Accelerator, asked: object = None) -> None:
        self.loaded: Loaded | None = None

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Keep the checkpoint's folder and details."""
        self.loaded = folder, details


def attach_to_loop(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook that watches the loop of ``run``, if the launch has ``--monitor``."""
    if not env.read(_FOLDER_VARIABLE):
        return None
    from .loop_watch import LoopWatch

    last = _last_load_of(run)
    return LoopWatch(run, lambda: last.loaded)


def watch_run(run: Accelerator, **options: Any) -> RunWatch:
    """Return the watch of a script; see ``Accelerator.watch_run``."""
    from .loop_watch import watch_script

    return watch_script(run, _last_load_of(run).loaded, **options)


def _last_load_of(run: Accelerator) -> LastLoad:
    return run.gradient_state.hooks.of(LastLoad)[-1]


GUEST: Final = Guest(
    commands=(
        Command(
            "monitor",
            f"{__name__}.command:monitor_command_parser",
            "Show a run while it trains: a live page, or the terminal.",
        ),
        Command(
            "report",
            f"{__name__}.hours:report_command_parser",
            "Say where the hours of a run went, over all its restarts.",
        ),
    ),
    launch_flags=(
        LaunchFlag(
            "--monitor",
            "Show the run on a page. [runs/NAME_TIME]",
            f"{__name__}.serve:begin",
            "[=FOLDER]",
        ),
    ),
    runs=(f"{__name__}:LastLoad", f"{__name__}:attach_to_loop"),
    functions={"watch_run": f"{__name__}:watch_run"},
)
