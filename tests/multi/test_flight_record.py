"""Ranks that part ways in collectives of torch's: the report names the collective, its number and the rank behind."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator
from accelerate.distributed.failures import note_logs
from accelerate.distributed.flight_record import FailureHook
from accelerate.distributed.world import leave_world
from accelerate.torch_private.distributed import flight_records
from tests.ranks import run_on_ranks
from tests.slow import IS_SLOW

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
    path = tmp_path / "flight_record" / "summary.json"
    summary = json.loads(path.read_text())
    missing = [num_ranks - 1] if fault == "is stopped" else []
    assert f": {path}" in text and summary["verdict"] == text.splitlines()[:-1]
    assert summary["missing"] == missing and len(summary["ranks"]) == num_ranks - len(missing)
    whole = json.loads((tmp_path / "flight_record" / "rank_0.json").read_text())
    assert whole["entries"][-1]["profiling_name"] == "gloo:all_reduce"


SCRIPT = """
import os, signal, sys, torch
from accelerate import Accelerator
from accelerate.distributed.failures import note_logs
run = Accelerator(cpu=True)
model = run.prepare(torch.nn.Linear(2, 2))
run.backward(model(torch.ones(1, 2)).sum())
if run.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    run.backward(model(torch.ones(1, 2)).sum())
except RuntimeError:
    sys.excepthook(*sys.exc_info())
    os._exit(1)
"""
#: A launcher that waits for what ranks print of their own, however slow this machine is.
PATIENT_LAUNCH = """
import sys
from accelerate.commands.accelerate_cli import main
from accelerate.launch import supervisor
supervisor.OUTPUT_GRACE_SECONDS = 60
sys.argv[0] = "accelerate"
sys.exit(main())
"""
#: A launcher stops this rank while it collects.
STOPPED = """
import atexit, os, signal, sys, time
from accelerate.distributed.flight_record import FailureHook
from accelerate.guests.preemption.notices import Notices
if "notices" in sys.argv:
    assert Notices(("SIGTERM",)).start()
def collect(is_urgent):
    os.kill(os.getpid(), signal.SIGTERM)
    while not is_urgent():
        time.sleep(0.01)
    return "what had arrived"
FailureHook.install().collect = collect
atexit.register(time.sleep, 60)  # as a rank that serves the others waits for them
raise ValueError("bad")
"""


def fail(folder: str, has_silent_rank: bool) -> str:
    """Rank 0 is in a collective, rank 1 fails, rank 2 doesn't answer or fails next; return what is printed."""
    run = Accelerator(cpu=True)
    watch, rank, done = run.world.coordinator.watch, run.process_index, Path(folder) / "done"
    if has_silent_rank and rank == 2:
        watch._stopped.set()
    run.wait_for_everyone()
    while rank == 1 and not watch._answers(watch._ask([0], "???"), [0])[0][1].collectives:
        time.sleep(0.01)  # until rank 0 is in its collective
    while rank == 2 and not done.exists():
        time.sleep(0.01)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        if rank == 1 or (rank == 2 and not has_silent_rank):
            sys.excepthook(ValueError, ValueError(f"no such row on rank {rank}"), None)
            done.touch()
    dist.all_reduce(torch.ones(3))
    return printed.getvalue()


@pytest.mark.parametrize("has_silent_rank", [False, True], ids=["all ranks answer", "a rank doesn't answer"])
def test_the_flight_records_of_a_failure_are_collected_into_one_file(
    has_silent_rank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the folder of the launcher's logs where there is one, else into a temporary one."""
    logs, records = tmp_path / "logs", tmp_path / "records"
    records.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"ACCELERATE_RECORDS_FOLDER": str(records)}
    if not has_silent_rank:
        note_logs(records, logs)
    nothing, told, second = run_on_ranks(fail, 3, str(tmp_path), has_silent_rank, environment=environment)
    who = "rank 1" if has_silent_rank else r"rank 1 is one collective behind.*rank 2 too"
    assert re.search(rf"(?s)no such row on rank 1\n.*Collectives: {who}.*in which rank 0 waits", told), told
    assert re.search(r"it hasn't entered all_reduce #\d+ \(12 B, Float \[3\]\) of the default group", told)
    assert nothing == "" and "Collectives" not in second and ("no such row" in second) is not has_silent_rank
    assert ("No flight record of rank 2:" in told) is has_silent_rank
    ranks = "0 and 1" if has_silent_rank else "0, 1 and 2"
    path = Path(re.search(rf"Flight records of ranks {ranks}: (.*)", told)[1])  # pyright: ignore[reportOptionalSubscript]
    assert path.name == "summary.json"
    assert path.parent.parent == tmp_path if has_silent_rank else path.parent == logs / "flight_record"
    summary = json.loads(path.read_text())
    assert set(summary["ranks"]) == ({"0", "1"} if has_silent_rank else {"0", "1", "2"})
    assert summary["missing"] == ([2] if has_silent_rank else [])


def test_the_error_of_a_rank_that_lost_another_names_the_collective(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-c", PATIENT_LAUNCH, "launch", "--cpu", "--num_processes", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode
    told = done.stderr
    found = re.search(r"This rank's last collective \(torch's flight record\): \w+ #\d+ \(.* of the default", told)
    assert found, told  # it may have been DDP's exchange of bucket sizes
    assert "First cause: rank 1 of 2" in told


@pytest.mark.parametrize("listens", ["", "notices"])
def test_a_rank_that_is_stopped_while_it_collects_ends_with_what_it_has(listens: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, listens], capture_output=True, text=True, timeout=50, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM
    assert "ValueError: bad" in done.stderr and done.stderr.endswith("what had arrived\n")


def test_nothing_is_said_where_torch_keeps_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._distributed_c10d._dump_fr_trace_json")
    assert not any("gloo" in dump for dump in flight_records())


def test_a_failure_after_the_world_has_ended_asks_nobody() -> None:
    """The hook keeps neither the watch nor the store, whose server rank 0 has."""

    def on_rank() -> tuple[bool, bool]:
        accelerator = Accelerator(cpu=True)
        coordinator = accelerator.world.coordinator
        assert coordinator is not None and coordinator.watch is not None
        hook = FailureHook.install()
        is_asked = hook.collect == coordinator.watch.report_of_failure
        leave_world()
        return is_asked, hook.collect is None

    assert run_on_ranks(on_rank, 2) == [(True, True)] * 2
