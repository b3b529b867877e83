"""A process of its own that kills what a launcher would leave behind, should the launcher itself be killed.

Run as a plain file by a bare interpreter (``python -I -S guardian.py``), so that it costs milliseconds. It
reads lines from its standard input: ``+PID`` guards the process group of PID, ``-PID`` no longer does. When
its input ends, for whatever reason, every group that is still guarded is killed.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """No guarded process group is alive when this returns."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    guarded: set[int] = set()
    for line in sys.stdin:
        change, pid = line[:1], int(line[1:])
        (guarded.add if change == "+" else guarded.discard)(pid)
    for pid in guarded:
        try:
            os.killpg(pid, signal.SIGKILL)
        except OSError:  # gone already
            continue


if __name__ == "__main__":
    main()
