"""``accelerate launch --monitor``: the launcher serves the page of the run while the run lasts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from ...errors import SettingError
from ...launch.plan import LaunchPlan
from ...settings import env

_FOLDERS: Final = "runs"
_PORT: Final = 8321
#: How long to wait until an open page has requested the end of the run; it sends one request per second.
_LAST_SECONDS: Final = 2.5


def begin(args: argparse.Namespace) -> Callable[[LaunchPlan], AbstractContextManager[LaunchPlan]]:
    """Choose the new run's folder; return a function that serves its page around the run."""
    folder = folder_of_launch(args)

    def around(plan: LaunchPlan) -> AbstractContextManager[LaunchPlan]:
        check_shown(plan)
        return shown(plan, folder)

    return around


def folder_of_launch(args: argparse.Namespace) -> Path:
    """Return the run's folder: the flag's, the environment's, or ``runs/<script>_<time>``; its outputs go there too."""
    from .records import FOLDER_VARIABLE

    given = getattr(args, "monitor", True)
    named = given if isinstance(given, str) else env.read(FOLDER_VARIABLE)
    if not named:
        named = f"{_FOLDERS}/{Path(str(args.training_script)).stem or 'run'}_{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(named).expanduser().absolute()
    if getattr(args, "log_dir", None) is None:
        args.log_dir = str(folder / "logs")
    return folder


def check_shown(plan: LaunchPlan) -> None:
    """Raise if no page can show the run.

    Raises:
        SettingError: another program starts the ranks, so this machine may not see them; or the run survives lost
            ranks, which share no losses.
    """
    from .records import FOLDER_VARIABLE

    if not plan.is_here:
        raise SettingError(
            f"--monitor shows a run that this launch starts here, and {plan.engine} hands it on. Set "
            f"{FOLDER_VARIABLE}=FOLDER for the ranks, one that this machine sees too, and run `accelerate monitor` "
            "there."
        )
    if plan.survives_lost_ranks:
        raise SettingError(
            f"--monitor shows a mean over all ranks, and those of this launch don't gather it, as any may be lost "
            f"({plan.engine}). Leave one of the two out."
        )


@contextlib.contextmanager
def shown(plan: LaunchPlan, folder: Path) -> Generator[LaunchPlan]:
    """Serve the page of the run in ``folder`` while the block runs; yield the plan whose ranks report there."""
    from .records import FOLDER_VARIABLE
    from .runs import Runs
    from .serve import Server

    folder.mkdir(parents=True, exist_ok=True)
    try:
        server = Server(Runs(folder), "127.0.0.1", _PORT)
    except OSError:  # taken, perhaps by another run's page
        server = Server(Runs(folder), "127.0.0.1", 0)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        name = os.path.relpath(folder)
        print(f"accelerate launch: showing the run at {server.url} (later: `accelerate monitor {name}`)",
              file=sys.stderr, flush=True)  # fmt: skip
        _open(server.url)
        try:
            yield dataclasses.replace(plan, environment={**plan.environment, FOLDER_VARIABLE: str(folder)})
        finally:
            if server.seconds_since_asked < _LAST_SECONDS:
                time.sleep(_LAST_SECONDS)
            server.shutdown()


def _open(url: str) -> None:
    """Open a browser if a person is at a terminal with a screen."""
    has_screen = sys.platform in ("darwin", "win32") or env.read("DISPLAY") or env.read("WAYLAND_DISPLAY")
    if has_screen and sys.stderr.isatty():
        import webbrowser

        webbrowser.open(url)
