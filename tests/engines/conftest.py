"""Real engines on this machine: each test starts the real program, and is left out where that isn't installed.

`make engines` installs what can be installed (tests/engines/setup.sh) and runs these; the usual suite doesn't.
All traffic stays on the loopback interface, or in network namespaces of the test's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".engines"
WHO = Path(__file__).with_name("who.py")
#: Words that a shell, or anything that splits or expands, would change.
NASTY = ("a b", "$(touch pwned)", "`touch pwned`", "*", "it's", 'say "x"', "x;touch pwned", "$HOME", "a\\b", "<>|&", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """These tests run only when they are asked for."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.engines)
        item.add_marker(pytest.mark.timeout(400))  # each launcher has a shorter limit of its own
        if "engines" not in (config.getoption("-m") or ""):
            item.add_marker(pytest.mark.skip(reason="starts real launchers: make engines"))


@dataclass
class Running:
    """A launcher that was started; its output goes to a file, which no process that stays behind can keep open."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def output(self) -> str:
        """All that was printed until now."""
        return self.path.read_text(errors="replace")

    def says(self, word: str, seconds: float = 60) -> None:
        """The word has been printed."""
        deadline = time.monotonic() + seconds
        while word not in self.output:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.1)

    def ended(self, seconds: float = 100) -> tuple[int, str]:
        """(exit code, all output), when the launcher has ended; code -9 when it had to be killed for its slowness."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            return -9, f"{self.output}\n(took longer than {seconds} s)"
        return self.process.returncode, self.output


@dataclass
class Launch:
    """`accelerate launch` in a folder of its own."""

    folder: Path
    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """The variables of the launching shell."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "home"),
            **self.variables,
        }

    def start(self, *words: str) -> Running:
        """The launcher, running."""
        command = [*self.prefix, self.python, "-m", "accelerate.commands.launch", *words]
        path = self.folder / f"launch-{time.monotonic_ns()}.txt"
        with path.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, path)

    def __call__(self, *words: str, timeout: float = 100) -> tuple[int, str]:
        """(exit code, all output) of the launcher."""
        return self.start(*words).ended(timeout)

    def lines(self) -> list[dict[str, Any]]:
        """What the ranks wrote with `--out .`, in rank order."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("[0-9]*.json")]
        return sorted(found, key=lambda line: line["rank"])


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A launcher in an empty folder that holds the program who.py."""
    shutil.copy(WHO, tmp_path / "who.py")
    return Launch(tmp_path)


def needs(*programs: str) -> None:
    """The test goes on where these programs are installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (make engines installs it)")


def python_of(name: str) -> str:
    """The interpreter of one of the environments that setup.sh makes."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment {python.parent.parent} (make engines makes it)")
    return str(python)


@pytest.fixture
def children() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs that have ended when the test has."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(words, start_new_session=True, **options)
        running.append(process)
        return process

    yield start
    for process in reversed(running):
        if process.poll() is None:
            process.terminate()
    for process in reversed(running):
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
