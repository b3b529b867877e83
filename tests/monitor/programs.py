"""The commands that these tests run as programs of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent / "src"),
}  # fmt: skip


def accelerate(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command of ``accelerate``."""
    command = [sys.executable, "-m", "accelerate.commands.main", *map(str, words)]
    environment = {**os.environ, **_ENVIRONMENT}
    return subprocess.Popen(
        command, text=True, env=environment, start_new_session=True, stdout=subprocess.PIPE, **options
    )


def end(program: subprocess.Popen[str]) -> None:
    """Interrupt the program and its children, and wait for it."""
    if program.poll() is None:
        os.killpg(program.pid, signal.SIGINT)
    try:
        program.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    if program.stdout is not None:
        program.stdout.close()


@contextlib.contextmanager
def monitor(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the page of ``folder``; yield the program and the page's address."""
    program = accelerate("monitor", folder.name, "--port", "0", cwd=folder.parent)
    try:
        assert program.stdout is not None
        yield program, program.stdout.readline().split(" at ")[1].split()[0]
    finally:
        end(program)
