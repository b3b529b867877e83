"""The option --watch of the examples: write the numbers of a run to a folder for `accelerate monitor`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "ACCELERATE_MONITOR"  # what `accelerate launch --monitor` sets for its ranks


class _Watch(argparse.Action):
    """Names the folder to the Accelerator, which is made later, and says how it is shown."""

    def __call__(self, parser: object, namespace: argparse.Namespace, folder: Any, option: object = None) -> None:
        """Keep the folder of a launch that watches the run already."""
        folder = os.environ.setdefault(VARIABLE, str(folder or default_folder()))
        setattr(namespace, self.dest, folder)
        if os.environ.get("RANK", "0") == "0":
            print(f"watched: accelerate monitor {folder}", file=sys.stderr)


def default_folder() -> str:
    """A folder of this run alone; the ranks of one launch, which have one parent, get the same one."""
    number = os.getppid() if "RANK" in os.environ else os.getpid()
    return f"runs/{Path(sys.argv[0]).stem}_{number}"


def add_watch(options: argparse.ArgumentParser) -> None:
    """Give a script's options --watch; nothing else of the script changes."""
    options.add_argument(
        "--watch",
        nargs="?",
        action=_Watch,
        metavar="FOLDER",
        help="keep the run's numbers in FOLDER (a new one in runs/), for `accelerate monitor runs`",
    )
