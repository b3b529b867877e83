"""One rank ends, in each way in which a rank can: the launcher names this rank, not the one that waited for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from tests.python_path import python_path
from tests.slow import IS_SLOW

SCRIPT = """\
import os, signal, sys, time
from datetime import timedelta
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

def leaves(accelerator, kind):
    if kind == "sys.exit(0)":
        sys.exit(0)
    if kind == "sys.exit(3)":
        sys.exit(3)
    if kind == "raises":
        raise ValueError("bad data: " + "a long reason " * 20 + "END")
    if kind.startswith("os._exit"):
        open(os.path.join(os.path.dirname(__file__), "left"), "w").close()
        os._exit(int(kind[-2]))
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(600)
    if kind == "out of memory":
        torch.empty(1 << 58)
    return True

def main(kind, rank):
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=10 if kind == "hangs" else 120))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])
    model = accelerator.prepare(torch.nn.Linear(2, 3))
    for step in range(9):
        if step == 4 and accelerator.process_index == rank and leaves(accelerator, kind):
            break
        accelerator.backward(model(torch.ones(1, 2)).sum())

main(sys.argv[1], int(sys.argv[2]))
"""
LAUNCHERS = {"local": [], "agent": ["--rdzv_backend", "c10d"]}
ENDS_WELL = ("leaves the loop", "sys.exit(0)", "os._exit(0)")
KINDS = (*ENDS_WELL, "sys.exit(3)", "os._exit(3)", "raises", "SIGKILL", "out of memory", "hangs")
ALL = [(kind, rank, launcher) for kind in KINDS for rank in (0, 1) for launcher in LAUNCHERS]
QUICK = [("leaves the loop", 0, "local")]


def launched(launcher: str, *command: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "2"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "200"}
    return subprocess.run(
        [*launch, "--main_process_port", "0", *LAUNCHERS[launcher], *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("kind", "rank", "launcher"), ALL if IS_SLOW else QUICK)
def test_the_rank_that_ended_first_is_the_cause(kind: str, rank: int, launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launched(launcher, str(tmp_path / "train.py"), kind, str(rank))
    if kind.startswith("os._exit") and launcher == "local":
        assert time.time() - (tmp_path / "left").stat().st_mtime < 25, "rank 0 has served the store to nobody"
    cause = done.stderr[done.stderr.find("First cause: ") :]
    assert done.returncode != 0 and cause.startswith(f"First cause: rank {rank} of 2"), done.stderr
    first = cause.splitlines()[0]
    if kind in ENDS_WELL:
        where = " at train.py:33 `main(sys.argv[1], int(sys.argv[2]))`" if kind != "os._exit(0)" else " with code 0"
        assert f"left the script{where} after" in first, cause
        # The line alone where torch keeps no record of collectives on CPU ranks.
        assert re.search(rf"while rank {1 - rank} was (in all_?reduce #\d+|at train.py:3\d)", first), cause
        assert f"Rank {1 - rank} then failed" in cause
    if kind == "raises":
        assert "a long reason END" in cause, "the cause is cut"


LEAVING = """\
import atexit, os, signal, sys, time

how, joins, mark = sys.argv[1], sys.argv[2] == "joins", __file__ + ".failing"
if joins:
    from accelerate import Accelerator
    Accelerator(cpu=True)
if os.environ["RANK"] == "0":
    open(mark, "w").close()
    if how == "killed by somebody else":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    atexit.register(time.sleep, 100)
    raise ValueError("the first")
while not os.path.exists(mark):
    time.sleep(0.01)
time.sleep(0.5)
raise KeyError("the second")
"""
HOW = ("leaves slowly", "ignores SIGTERM", "killed by somebody else")
#: torch's agent knows the exceptions of ranks that have joined a world.
ALL_LEAVING = [(how, joins, launcher) for how in HOW for joins, launcher in product((True, False), LAUNCHERS)]
ALL_LEAVING = [one for one in ALL_LEAVING if one[1:] != (False, "agent")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "joins", "launcher"), ALL_LEAVING if IS_SLOW else [("leaves slowly", False, "local")])
def test_the_rank_that_raised_first_is_the_cause_however_long_it_takes_to_leave(
    how: str, joins: bool, launcher: str, tmp_path: Path
) -> None:
    """Its exit code is that of the exception, also where the launcher had to end it."""
    script = tmp_path / "train.py"
    script.write_text(LEAVING)
    done = launched(launcher, str(script), how, "joins" if joins else "")
    cause = done.stderr[done.stderr.find("First cause: ") :]
    if how == "killed by somebody else":
        assert re.match(r"First cause: rank 0 of 2 \(.*\) was killed by SIGTERM after ", cause), done.stderr
        assert done.returncode == 143
    else:
        assert re.match(r"First cause: rank 0 of 2 \(.*\) raised after ", cause), done.stderr
        assert "ValueError: the first" in cause and done.returncode == 1
