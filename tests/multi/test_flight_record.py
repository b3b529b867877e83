"""Ranks that part ways in collectives of torch's: the report names the collective, its number and the rank behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator
from accelerate.torch_private.distributed import flight_records
from tests.ranks import run_on_ranks

IS_SLOW = "RUN_SLOW" in os.environ
REDUCTION = r"all_reduce #\d+ \(24 B, Float \[6\]\) of the default group"
#: By fault what the report says of the last rank, the others being in a backward pass.
FAULTS = {
    "skips it": rf"rank LAST is one collective behind: it hasn't entered {REDUCTION}, in which ranks? 0.* wait",
    "another operation": r"collective #\d+ of the default group isn't the same on all ranks: ranks? 0.* in "
    r"all_reduce \(24 B, Float \[6\]\); rank LAST in broadcast \(12 B, Float \[3\]\)",
    "another group": rf"(?s)it hasn't entered {REDUCTION}.*Collectives: rank 0 is one collective behind: "
    r"it hasn't entered all_reduce #1 \(20 B, Float \[5\]\) of group \d+ \(side\)",
    "is stopped": rf"(?s)rank LAST doesn't respond.*Collectives: ranks? 0.* waits? in {REDUCTION}\.",
}
CASES = [(fault, 2) for fault in FAULTS] + ([(fault, 4) for fault in FAULTS] if IS_SLOW else [("skips it", 4)])

pytestmark = pytest.mark.skipif(
    not hasattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json"), reason="torch keeps no flight record"
)


class Report(logging.Handler):
    """Ends this process when the report is there, and the files that it promises."""

    def __init__(self, folder: Path, awaited: int) -> None:
        super().__init__()
        self.folder, self.awaited = folder, awaited

    def emit(self, record: logging.LogRecord) -> None:
        until = time.monotonic() + 20
        while len(list((self.folder / "flight_record").glob("*.json"))) < self.awaited and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)  # the last one is being written
        (self.folder / "report").write_text(record.getMessage())
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
        os._exit(17)


def part_ways(fault: str, folder: str, side: Any) -> None:
    """The last rank does something else than the others."""
    (Path(folder) / "pid").write_text(str(os.getpid()))
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "another operation":
        dist.broadcast(torch.ones(3), 0)
    elif fault == "another group":
        dist.all_reduce(torch.ones(5), group=side)
    time.sleep(60)


def step(fault: str, folder: str) -> None:
    run = Accelerator(cpu=True, project_dir=folder)
    model = run.prepare(torch.nn.Linear(2, 2))
    side = dist.new_group(list(range(run.num_processes)), group_desc="side")
    run.backward(model(torch.ones(1, 2)).sum())
    awaited = run.num_processes + (0 if fault == "is stopped" else 1)
    logging.getLogger("accelerate.distributed.watchdog").addHandler(Report(Path(folder), awaited))
    loss = model(torch.ones(1, 2)).sum()
    if run.process_index == run.num_processes - 1:
        part_ways(fault, folder, side)
    run.backward(loss)


@pytest.mark.parametrize(("fault", "num_ranks"), CASES)
def test_the_report_of_a_hang_names_the_collective(fault: str, num_ranks: int, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"17|died|rank"):
        run_on_ranks(
            step, num_ranks, fault, str(tmp_path), environment={"ACCELERATE_HANG_SECONDS": "1"}, timeout_seconds=60
        )
    text = (tmp_path / "report").read_text()
    assert re.search(FAULTS[fault].replace("LAST", str(num_ranks - 1)), text), text
    assert f"Flight records of all ranks: {tmp_path / 'flight_record'}" in text
    summary = json.loads((tmp_path / "flight_record" / "summary.json").read_text())
    assert summary["verdict"] == text.splitlines() and "0" in summary["ranks"]
    whole = json.loads((tmp_path / "flight_record" / "rank_0.json").read_text())
    assert whole["entries"][-1]["profiling_name"] == "gloo:all_reduce"


SCRIPT = """
import os, signal, sys, torch
from accelerate import Accelerator
run = Accelerator(cpu=True)
model = run.prepare(torch.nn.Linear(2, 2))
run.backward(model(torch.ones(1, 2)).sum())
if run.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
run.backward(model(torch.ones(1, 2)).sum())
"""


def test_the_error_of_a_rank_that_lost_another_names_the_collective(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode
    found = re.search(
        r"This rank's last collective \(torch's flight record\): \w+ #\d+ \(.* of the default", done.stderr
    )
    assert found, done.stderr  # it may have been DDP's exchange of bucket sizes
    assert "First cause: rank 1 of 2" in done.stderr


def test_nothing_is_said_where_torch_keeps_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._distributed_c10d._dump_fr_trace_json")
    assert not any("gloo" in dump for dump in flight_records())
