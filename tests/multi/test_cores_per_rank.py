"""The threads that torch computes with on each rank, by every start, where the run is bound to one core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.cores import num_cores, usable_cpus
from accelerate.ports import get_free_port
from tests.python_path import python_path
from tests.slow import slow

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")


TRAIN = """
import os, sys
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
import torch
told = f"{torch.get_num_threads()} {os.environ.get('OMP_NUM_THREADS')}"
open(sys.argv[1] + f"/{accelerator.process_index}", "w").write(told)
"""

NOTEBOOK = """
import sys
from accelerate import NAME

def train(folder):
    import os, torch
    told = f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}"
    open(f"{folder}/{os.environ['RANK']}", "w").write(told)

NAME(train, (sys.argv[1],), num_processes=2)
"""

RANKS_BY_HAND = """
import os, subprocess, sys
ranks = [subprocess.Popen(
    [sys.executable, *sys.argv[1:]],
    env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
) for rank in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""

LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes"]


def told(tmp_path: Path, command: list[str], cpus: frozenset[int], **variables: str) -> list[list[str]]:
    """The threads of torch and OMP_NUM_THREADS on each rank, by rank, of a run that is bound to the CPUs."""
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    port = str(get_free_port())
    environment = {**base, "PYTHONPATH": python_path(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [file.read_text().split() for file in sorted((tmp_path / "told").iterdir())]


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    """The program and the folder where its ranks write."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "told").mkdir()
    return [str(tmp_path / "train.py"), str(tmp_path / "told")]


@pytest.mark.parametrize(
    "start",
    ["two", *(pytest.param(name, marks=slow) for name in ("one", "notebook_launcher", "debug_launcher", "by hand"))],
)
def test_a_run_bound_to_one_core_computes_with_one_thread_per_rank(
    tmp_path: Path, script: list[str], start: str
) -> None:
    one_cpu = frozenset(sorted(usable_cpus())[:1])
    (tmp_path / "notebook.py").write_text(NOTEBOOK.replace("NAME", start))
    (tmp_path / "by_hand.py").write_text(RANKS_BY_HAND)
    notebook = [str(tmp_path / "notebook.py"), script[1]]
    command = {
        "one": [*LAUNCH, "1", *script],
        "two": [*LAUNCH, "2", *script],
        "notebook_launcher": notebook,
        "debug_launcher": notebook,
        "by hand": [str(tmp_path / "by_hand.py"), *script],
    }[start]
    threads = [int(threads) for threads, _ in told(tmp_path, command, one_cpu)]
    assert threads == ([1] if start == "one" else [1, 1])


def test_one_launched_process_takes_all_cores_that_it_may_use(tmp_path: Path, script: list[str]) -> None:
    ((threads, _),) = told(tmp_path, [*LAUNCH, "1", *script], usable_cpus())
    assert int(threads) == num_cores()


def test_the_users_number_wins(tmp_path: Path, script: list[str]) -> None:
    ranks = told(tmp_path, [*LAUNCH, "2", *script], usable_cpus(), OMP_NUM_THREADS="7")
    assert [number for _, number in ranks] == ["7", "7"]  # torch itself may use fewer, where there are fewer CPUs
