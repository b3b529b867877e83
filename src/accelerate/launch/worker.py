"""The program of a rank that was started for a function: ``python -m accelerate.launch.worker FOLDER``."""

from __future__ import annotations

import io
import sys
from pathlib import Path


def main() -> int:
    """Run the function of the folder, write its result there and return the rank's exit code."""
    from ..settings import env
    from .fork import call_and_report, read_function

    for stream in (sys.stdout, sys.stderr):  # whole lines, so that those of two ranks don't mix
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    folder = Path(sys.argv[1])
    function, args = read_function(folder)
    return call_and_report(function, args, folder, int(env.read("RANK", "0") or 0))


if __name__ == "__main__":
    sys.exit(main())
