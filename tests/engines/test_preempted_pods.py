"""A pod's stand-in: the launcher is process 1 of a namespace, gets SIGTERM, and is started again as before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.engines.conftest import Launch

HERE = Path(__file__).parent


@pytest.mark.parametrize("more", [(), ("--max_restarts", "1", "--main_process_port", "0")], ids=["supervised", "agent"])
def test_a_pod_that_is_evicted_saves_and_its_successor_goes_on(launch: Launch, more: tuple[str, ...]) -> None:
    namespace = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of processes here")
    shutil.copy(HERE / "preempted.py", launch.folder)
    for name in ("undisturbed", "run"):
        (launch.folder / name).mkdir()
    given = ("--cpu", "--num_processes", "2", "--save_on_signal", "--grace_seconds", "60", *more, "preempted.py")
    code, output = launch(*given, "undisturbed")
    assert code == 0, output
    launch.prefix = namespace
    running = launch.start(*given, "run")
    starts = [launch.folder / "run" / f"starts_{rank}.txt" for rank in (0, 1)]
    until = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in starts):
        assert time.monotonic() < until and running.process.poll() is None, running.output
        time.sleep(0.1)
    time.sleep(1)
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)  # process 1 of the pod
    code, output = running.ended(60)
    assert code == 75, output
    assert "All 2 ranks saved" in output
    code, output = launch(*given, "run")
    assert code == 0, output
    for rank, file in enumerate(starts):
        resumed = [line.partition(" ")[2].rpartition("/")[2] for line in file.read_text().splitlines()]
        assert resumed == ["None", "checkpoint_0"]
        weights = [(launch.folder / name / f"weights_{rank}.txt").read_text() for name in ("undisturbed", "run")]
        assert weights[0] == weights[1]
