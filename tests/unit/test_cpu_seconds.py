"""`make costs` counts what the processes of a test spend, while they live and after."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ninput()"
TESTS = f"""
import subprocess, sys

def started():
    process = subprocess.Popen([sys.executable, "-c", {BURN!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process

LIVING = []

def test_that_leaves_a_process():
    LIVING.append(started())

def test_that_ends_a_process():
    started().communicate(b"\\n")

def test_that_does_little():
    pass

def test_that_ends_an_old_process():
    LIVING.pop().communicate(b"\\n")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere processes that live aren't counted")
def test_each_test_is_charged_for_its_processes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.cpu_seconds", "-p", "no:cacheprovider", str(tmp_path)]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.partition("CPU seconds of tests")[2]
    found = {name: float(seconds) for seconds, name in re.findall(r"([\d.]+) s +1  test_it.py::test_that_(\w+)", lines)}
    assert found["leaves_a_process"] >= 0.3 and found["ends_a_process"] >= 0.3
    assert found["does_little"] < 0.3 and found["ends_an_old_process"] < 0.3
