"""A separate process that kills a launcher's leftovers if the launcher itself is killed.

Run as a plain file by a bare interpreter (``python -I -S reaper.py``), so that it costs milliseconds. It
reads lines from its standard input: ``+PID`` registers the process group of PID, ``-PID`` unregisters it, and ``=PATH``
registers a folder. When its input ends, for whatever reason, every group that is still registered is killed, and the
folders are removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys


def main() -> None:
    """Read changes until the input ends, then kill every process group and remove every folder that is registered."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    registered: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        if line[:1] == "=":
            folders.append(line[1:].rstrip("\n"))
            continue
        change, pid = line[:1], int(line[1:])
        (registered.add if change == "+" else registered.discard)(pid)
    for pid in registered:
        try:
            os.killpg(pid, signal.SIGKILL)
        except OSError:  # gone already
            continue
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
