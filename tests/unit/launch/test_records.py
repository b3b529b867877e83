"""Whatever ends a rank, its record says so: by itself, else by its launcher, else by the process that comes next."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.distributed import failures as module
from accelerate.distributed.failures import MemoryWatch
from accelerate.guests.monitor.reading import RunFiles
from accelerate.guests.monitor.records import RankRecord
from accelerate.guests.monitor.snapshot import snapshot
from accelerate.guests.monitor.terminal import screen
from accelerate.launch.plan import LaunchPlan, Program
from accelerate.launch.supervisor import supervise
from accelerate.settings import env

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX processes")

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from accelerate.guests.monitor.records import RankRecord
rank, how = int(os.environ["RANK"]), sys.argv[1]
record = RankRecord(Path("run/monitor"), rank)
record.start(rank=rank)
record.numbers({"step": 3, "loss": 0.5})
for file in (Path(f"run/monitor/rank_{each}.jsonl") for each in (0, 1)):
    while not file.exists() or '"step"' not in file.read_text():
        time.sleep(0.02)  # until both have begun
if rank == 0:
    if how == "preempted":
        record.event("preempted", text="SIGUSR1 to rank 0", folder="checkpoint_1")
    if how == "out of memory":  # what the kernel writes, and does then
        Path("kmsg").write_text(f"3,1,5,-;Out of memory: Killed process {os.getpid()} (python) anon-rss:8kB\\n")
    if how in ("SIGKILL", "SIGTERM", "out of memory"):
        os.kill(os.getpid(), signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    if how == "raise":
        raise ValueError("the reason")
    sys.exit({"exit": 3, "preempted": 75, "normal": 0}[how])
if how != "normal":
    time.sleep(60)
"""


def run(folder: Path, how: str) -> int:
    """Two ranks, the first of which ends so; the exit code."""
    (folder / "script.py").write_text(PROGRAM)
    plan = LaunchPlan(
        engine="local",
        argv=Program(str(folder / "script.py"), (how,)).argv(),
        environment={"WORLD_SIZE": "2", "PYTHONPATH": ":".join(sys.path)},
        ranks=({"RANK": "0"}, {"RANK": "1"}),
        cwd=folder,
        grace_seconds=0.5,
    )
    return supervise(plan, env.snapshot())[0]


def ends(folder: Path) -> list[list[tuple[str, str]]]:
    """The events of each rank after its start, with their texts."""
    files = [folder / f"run/monitor/rank_{rank}.jsonl" for rank in (0, 1)]
    lines: list[list[dict[str, Any]]] = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(one["event"], one.get("text", "")) for one in found if "event" in one][1:] for found in lines]


@pytest.mark.parametrize(
    ("how", "code", "event", "text", "state"),
    [
        ("SIGKILL", 137, "killed", "the process was killed by SIGKILL. ", "failed"),
        ("SIGTERM", 143, "killed", "the process was killed by SIGTERM", "failed"),
        ("out of memory", 137, "killed", "the process was killed by SIGKILL. Out of memory: Killed process ", "failed"),
        ("raise", 1, "error", "ValueError: the reason", "failed"),
        ("exit", 3, "killed", "the process exited with code 3", "failed"),
        ("preempted", 75, "preempted", "SIGUSR1 to rank 0", "preempted"),
        ("normal", 0, "end", "", "finished"),
    ],
)
def test_the_end_of_each_rank_is_recorded_and_shown(
    how: str, code: int, event: str, text: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KERNEL_LOG", str(tmp_path / "kmsg"))
    assert run(tmp_path, how) == code
    first, second = ends(tmp_path)
    kinds = [kind for kind, _ in first if kind != "end"] or ["end"]
    assert kinds == [event]
    assert next(said for kind, said in first if kind == event).startswith(text)
    files = RunFiles(tmp_path / "run")
    files.refresh()
    content = snapshot(files)
    if how == "normal":
        assert second == [("end", "")]
    else:
        assert second[-1][0] == "killed" and "stopped by the launcher with SIG" in second[-1][1]
        assert text.strip() in "\n".join(screen(content, 300))
    assert content["ranks"][0]["state"] == state
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("accelerate_records")]


def test_the_next_process_records_what_nobody_could(tmp_path: Path) -> None:
    record = tmp_path / "rank_0.jsonl"
    record.write_text('{"time": 1.0, "event": "start"}\n{"time": 2.0, "step": 1, "loss": 0.5}\n{"time": 3.0, "st')
    for _ in range(2):
        made = RankRecord(tmp_path, 0)
        made.start()
        made.finish()
    events = [json.loads(line)["event"] for line in record.read_text().splitlines() if '"event"' in line]
    assert events == ["start", "killed", "start", "end", "start", "end"]


def test_the_kernels_own_line_about_a_killed_process_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,5,-;Out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:8kB\n SUBSYSTEM=mm\n")
    monkeypatch.setattr(module, "_KERNEL_LOG", str(log))
    watch = MemoryWatch(tmp_path, tmp_path / "none", {})
    assert watch.evidence(4711) == "Out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:8kB"
    assert watch.evidence(471).startswith("The kernel's count of out-of-memory kills can't be read here.")
