"""`make flakes` finds a test that fails in one run only, and ends its load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.flakes import BUSY, NUM_BUSY, load

ROOT = Path(__file__).resolve().parent.parent.parent
FLAKE = """
import os
from pathlib import Path

def test_that_passes():
    pass

def test_that_fails_beside_a_load():
    runs = Path(os.environ["RUNS"])
    runs.write_text(runs.read_text() + ".")
    assert runs.read_text() != "..", "the second run"
"""


def test_a_failure_in_one_of_three_runs_is_named_and_its_output_kept(tmp_path: Path) -> None:
    (tmp_path / "test_flake.py").write_text(FLAKE)
    (tmp_path / "runs").write_text("")
    (tmp_path / "pytest.ini").touch()  # names of tests begin here, also where the checkout is beside this folder
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "tests.flakes", "--num_runs", "3", "--num_workers", "0", "--folder", str(kept)]
    variables = {"RUNS": str(tmp_path / "runs"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--select", str(tmp_path)], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = (kept / "summary.txt").read_text().splitlines()
    assert [line.partition(", in")[0].split() for line in lines if line.startswith("run")] == [
        ["run", "1", "alone", "2", "passed,", "0", "failed,", "0", "skipped"],
        ["run", "2", "beside", "a", "load", "1", "passed,", "1", "failed,", "0", "skipped"],
        ["run", "3", "alone", "2", "passed,", "0", "failed,", "0", "skipped"],
    ]
    assert [line for line in lines if "FAILED" in line] == ["  FAILED test_flake.py::test_that_fails_beside_a_load"]
    assert sorted(path.name for path in kept.iterdir()) == ["run_2.log", "run_2.xml", "summary.txt"]
    assert "the second run" in (kept / "run_2.log").read_text()


def test_the_load_ends_with_the_run() -> None:
    def busy() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if BUSY in child.cmdline()]

    with load(NUM_BUSY):
        assert len(busy()) == NUM_BUSY
    assert busy() == []
