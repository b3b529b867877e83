"""What the tests of the seed rows share: the table of rows, and ways to start programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path
from tests.ranks import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LISTINGS = HERE / "listings"
STUBS = HERE / "stubs"


def _table(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def rows() -> dict[str, str]:
    """Every row of the seeds: id -> what must work."""
    return _table(HERE / "rows.txt")


def pending() -> dict[str, str]:
    """The rows that are not fulfilled yet: id -> what is missing."""
    return _table(HERE / "pending.txt")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: ours, with the source and the stubs on its path, and nothing of a launcher."""
    return {
        **os.environ,
        "PYTHONPATH": python_path(STUBS),
        "PYTHONWARNINGS": "default",
        **extra,
    }


def run(
    command: list[str | Path],
    *,
    typed: str | None = None,
    folder: Path | None = None,
    timeout_seconds: float = 110,
    expect: int | None = 0,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """The finished program.

    Raises:
        AssertionError: its exit code is not the expected one; the text holds what it wrote.
    """
    finished = subprocess.run(
        [str(word) for word in command],
        input=typed if typed is not None else "",
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=timeout_seconds,
        env=environment(**extra),
    )
    if expect is not None and finished.returncode != expect:
        said = f"--- stdout\n{finished.stdout[-3000:]}\n--- stderr\n{finished.stderr[-6000:]}"
        raise AssertionError(f"{command} ended with {finished.returncode}, not {expect}\n{said}")
    return finished


ACCELERATE = [sys.executable, "-m", "accelerate.commands.main"]


def launcher(name: str, num_processes: int = 2) -> list[str]:
    """The words before the script."""
    port = str(free_port())
    count = str(num_processes)
    return {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, "--master-port", port],
        "torch.distributed.launch": [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.launch",
            "--nproc-per-node", count, "--master-port", port,
        ],
        "accelerate": [*ACCELERATE, "launch", "--cpu", "--num_processes", count, "--main_process_port", port],
    }[name]  # fmt: skip
