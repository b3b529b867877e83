"""Random kills at random moments: nothing is left behind, and the reason is on the screen.

``KILLS=100 pytest tests/unit/launch/test_kills.py`` runs the long version.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("KILLS", "8"))
SCRIPT = """\
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
with open(os.path.join(sys.argv[1], f"pids.{os.environ['RANK']}"), "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


def session_members(marker: str) -> list[int]:
    """The processes whose command line or environment holds the marker."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            dead = "State:\tZ" in (folder / "status").read_text()
        except OSError:
            continue
        if marker.encode() in text and not dead:
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.timeout(20 + 6 * KILLS)
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_random_kill_leaves_no_process_and_names_the_cause(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    (tmp_path / "script.py").write_text(SCRIPT)
    marker = f"accelerate_kill_test_{os.getpid()}_{seed}_"
    environment = {**os.environ, "PYTHONPATH": python_path(), "MARKER": marker}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "3"]
    command += ["--main_process_port", "0", "script.py", str(tmp_path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    victim = chance.choice(["launcher", "rank 0", "rank 1", "rank 2"])
    early = victim == "launcher" and chance.random() < 0.5
    if early:
        time.sleep(chance.uniform(0.0, 0.6))
        os.kill(launcher.pid, signal.SIGKILL)
    else:
        pids = {rank: tmp_path / f"pids.{rank}" for rank in range(3)}
        deadline = time.monotonic() + 30
        while not all(path.exists() and path.read_text() for path in pids.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.1))
        target = launcher.pid if victim == "launcher" else int(pids[int(victim[-1])].read_text().split()[0])
        os.kill(target, signal.SIGKILL)
    _, err = launcher.communicate(timeout=30)
    deadline = time.monotonic() + 5
    while (left := session_members(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    if victim != "launcher":
        assert launcher.returncode == 137
        last = err.splitlines()[-15:]
        assert any(line.startswith(f"First cause: {victim} of 3") and "SIGKILL" in line for line in last)
