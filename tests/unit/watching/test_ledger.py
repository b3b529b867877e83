"""What the time of a process is counted as, and what the ledgers of all of them tell together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.commands.main import main
from accelerate.errors import SettingError
from accelerate.guests.monitor import hours as report
from accelerate.guests.monitor import ledger as module
from accelerate.guests.monitor.hours import hours, read_ledgers
from accelerate.guests.monitor.ledger import Account, Ledger, Position, process_age
from accelerate.torch_private.modules import compile_seconds

NOTHING = Position(0, 0, 0, 0.0, 0.0, 0.0, progress=0, stalled=None)


class Loop:
    """A loop whose position, and a clock, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, hang_seconds: float = 10.0) -> None:
        self.now, self.at = 100.0, NOTHING
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "process_age", lambda: 3.0)
        monkeypatch.setattr(module._Newest, "until", float("-inf"))
        monkeypatch.setattr(Ledger, "_keep", lambda ledger: None)  # no thread writes: the test does
        self.ledger = Ledger(folder / "monitor", self.position, hang_seconds)
        self.folder = folder

    def position(self) -> Position:
        return self.at

    def go(self, seconds: float, **changes: Any) -> None:
        self.now += seconds
        self.at = self.at._replace(**changes)

    def seconds(self) -> dict[str, float]:
        """Write a line, and return what the file then says."""
        self.ledger._write()
        (lines,) = read_ledgers(self.folder)
        assert sum(lines[-1].seconds.values()) == pytest.approx(lines[-1].elapsed, abs=0.01)
        return {kind: each for kind, each in lines[-1].seconds.items() if each > 0}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Loop:
    return Loop(monkeypatch, tmp_path)


def test_each_second_is_counted_once(loop: Loop) -> None:
    loop.go(2)
    loop.ledger.rejoin(None, loop.now)
    loop.go(5, updates=10, waited=0.5, progress=10)
    assert loop.seconds() == {"start_up": 5, "step": 4.5, "data_wait": 0.5}
    loop.go(1)
    loop.ledger.saved(1)
    loop.ledger.enter("evaluation", loop.now)
    loop.go(4)
    loop.ledger.rejoin(None, loop.now - 1)  # the pass began before its first step was done
    loop.go(1, compiled=0.25, evaluated=0.5)
    expected = {"start_up": 5, "step": 5.75, "data_wait": 0.5, "save": 1, "evaluation": 3.5, "compile": 0.25}
    assert loop.seconds() == expected
    loop.ledger.finish("end")
    loop.go(1)
    assert loop.seconds() == {**expected, "shutdown": 1}


def test_a_pass_that_was_left_ends_with_its_last_step(loop: Loop) -> None:
    loop.ledger.rejoin(None, loop.now)
    loop.go(3)
    last = loop.now
    loop.go(2)
    loop.ledger.rejoin(last, loop.now)
    loop.go(1)
    assert loop.seconds() == {"start_up": 3, "step": 4, "evaluation": 2}


@pytest.mark.parametrize("has_watch", [False, True])
def test_a_hang_lasts_from_the_last_progress_until_it_is_over(loop: Loop, has_watch: bool) -> None:
    loop.ledger.rejoin(None, loop.now)
    loop.go(1, progress=1, stalled=0.0 if has_watch else None)
    loop.seconds()
    loop.go(9, stalled=9.0 if has_watch else None)
    assert loop.seconds() == {"start_up": 3, "step": 10}
    loop.go(11, stalled=20.0 if has_watch else None)
    assert loop.seconds() == {"start_up": 3, "step": 1, "hang": 20}  # and so it stays if the process is killed now
    loop.go(1, progress=2, stalled=0.0 if has_watch else None)
    assert loop.seconds() == {"start_up": 3, "step": 2, "hang": 20}


def test_a_long_wait_for_data_is_no_hang(loop: Loop) -> None:
    loop.ledger.rejoin(None, loop.now)
    loop.go(1, progress=1)
    loop.seconds()
    loop.go(20)
    assert loop.seconds()["hang"] == 20
    loop.go(1, progress=2, waited=20.0)
    assert loop.seconds() == {"start_up": 3, "step": 2, "data_wait": 20}


def test_what_is_counted_twice_is_taken_from_one_part() -> None:
    account = Account(0.0, "step")
    account.enter("step", 10.0)
    account.move("hang", 8.0)
    account.move("data_wait", 9.0)
    account.settle()
    assert account.seconds == {"step": 0.0, "hang": 1.0, "data_wait": 9.0}


def test_a_torn_line_costs_the_other_one_nothing(loop: Loop) -> None:
    loop.go(1)
    loop.seconds()
    loop.go(1)
    loop.seconds()
    loop.ledger.keep()
    (file,) = (loop.folder / "monitor" / "ledger").glob("*.jsonl")
    with file.open("r+b") as opened:  # the process died in the middle of the last write
        opened.seek(-512, os.SEEK_END)
        opened.write(b"\0" * 100)
    (lines,) = read_ledgers(loop.folder)
    assert lines[-1].elapsed == 5.0


def test_the_file_stays_small_and_keeps_what_was_at_a_save(loop: Loop) -> None:
    for _ in range(50):
        loop.go(1, updates=loop.at.updates + 1)
        loop.seconds()
    loop.ledger.saved(0.5)
    for _ in range(50):
        loop.go(1, updates=loop.at.updates + 1)
        loop.seconds()
    (lines,) = read_ledgers(loop.folder)
    assert len(lines) <= 4 and {50, 99, 100} <= {line.updates for line in lines}


def test_a_second_loop_of_a_process_begins_where_the_first_ended(loop: Loop) -> None:
    loop.go(5)
    second = Ledger(loop.folder / "monitor", loop.position, 10.0)
    assert not loop.ledger.is_alive and second.is_alive
    loop.go(2)
    second._write()
    assert sorted(lines[-1].elapsed for lines in read_ledgers(loop.folder)) == [2.0, 8.0]
    second.close()


def test_a_folder_that_cannot_be_written_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "monitor").write_text("a file")
    loop = Loop(monkeypatch, tmp_path)
    loop.ledger._write()
    assert not loop.ledger.is_alive and "training continues" in capsys.readouterr().err
    loop.ledger.saved(1.0)


def test_a_process_has_an_age() -> None:
    assert 0 < process_age() < 86400 * 30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the age is that of the import")
def test_a_forked_process_is_younger_than_the_one_that_imported() -> None:
    code = (
        "import os, time; from accelerate.guests.monitor.ledger import process_age; time.sleep(0.5)\n"
        "begun = process_age()\n"
        "if os.fork() == 0: os._exit(process_age() >= begun)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- the reader --------------------------------------------------------------------------------------------


def write(folder: Path, began: float, *lines: dict[str, Any]) -> None:
    path = folder / "monitor" / "ledger" / f"{began:.3f}_1.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    usual = {"began": began, "pid": 1, "first_update": 0, "loads": 0, "phase": "step", "ended": None}
    path.write_text("".join(json.dumps({**usual, **line}) + "\n" for line in lines))


def line(elapsed: float, updates: int, **more: Any) -> dict[str, Any]:
    """A line of a process that starts for ten seconds, and then makes an update a second, a tenth of it waiting."""
    work = max(0.0, elapsed - 10)
    seconds = {"start_up": min(10.0, elapsed), "step": 0.9 * work, "data_wait": 0.1 * work}
    return {"elapsed": elapsed, "updates": updates, "seconds": seconds, **more}


def found(folder: Path) -> Any:
    known = hours(folder)
    assert known is not None
    assert sum(known["seconds"].values()) == pytest.approx(known["wall_seconds"])
    return known


def test_steps_are_lost_that_are_done_again(tmp_path: Path) -> None:
    write(tmp_path, 1000, line(10, 0), line(50, 40), line(110, 100))  # a checkpoint at 40
    resumed = {"first_update": 40, "loads": 1}
    write(tmp_path, 1130, line(10, 40, **resumed), line(40, 70, **resumed))
    known = found(tmp_path)
    assert (known["starts"], known["updates"], known["lost_updates"]) == (2, 70, 60)
    assert known["wall_seconds"] == 170 and known["seconds"]["idle"] == 20
    assert known["seconds"]["lost"] == pytest.approx(60)
    assert known["seconds"]["step"] == pytest.approx(0.9 * 70)
    assert known["goodput"] == pytest.approx(0.9 * 70 / 170)


def test_a_start_that_did_nothing_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1000, line(10, 0), line(110, 100))
    write(tmp_path, 1110, line(5, 0))  # killed before it resumed
    assert found(tmp_path)["lost_updates"] == 0
    write(tmp_path, 1115, line(10, 100, first_update=100, loads=1), line(20, 110, first_update=100, loads=1))
    known = found(tmp_path)
    assert known["lost_updates"] == 0 and known["starts"] == 3 and known["seconds"]["start_up"] == 25


def test_a_load_in_the_middle_loses_what_it_goes_back_behind(tmp_path: Path) -> None:
    back = {"first_update": 20, "loads": 1}
    write(tmp_path, 1000, line(10, 0), line(30, 20), line(60, 50), line(60, 20, **back), line(70, 30, **back))
    known = found(tmp_path)
    assert known["lost_updates"] == 30 and known["seconds"]["lost"] == pytest.approx(30)


def test_updates_that_are_lost_twice_count_twice(tmp_path: Path) -> None:
    write(tmp_path, 1000, line(10, 0), line(30, 20))
    write(tmp_path, 1030, line(10, 0), line(20, 10))
    write(tmp_path, 1050, line(10, 0), line(40, 30))
    assert found(tmp_path)["lost_updates"] == 30


def test_a_run_begins_anew_after_one_that_has_ended(tmp_path: Path) -> None:
    write(tmp_path, 1000, line(110, 100, ended="end"))
    write(tmp_path, 5000, line(20, 110, first_update=100, loads=1, ended="end"))  # the same run, gone on with
    assert found(tmp_path)["starts"] == 2
    write(tmp_path, 9000, line(10, 0), line(20, 10))
    known = found(tmp_path)
    assert known["starts"] == 1 and known["wall_seconds"] == 20


def test_clocks_of_two_hosts_that_differ_make_no_negative_time(tmp_path: Path) -> None:
    write(tmp_path, 1000, line(10, 0), line(30, 20))
    write(tmp_path, 1029, line(10, 20, first_update=20, loads=1), line(30, 40, first_update=20, loads=1))
    known = hours(tmp_path)
    assert known is not None and known["seconds"]["idle"] == 0


def test_the_report_is_a_table_of_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, line(10, 0), line(3600, 3590))
    write(tmp_path, 7200, line(10, 1795, first_update=1795, loads=1), line(3610, 5395, first_update=1795, loads=1))
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("5,395 updates, 2 starts, 3:00:10 wall-clock time\n")
    rows = {text[:22].strip(): text[22:].split() for text in shown.splitlines()[3:-2]}
    assert rows["downtime"] == ["1.000", "1:00:00", "33.3%"]
    assert rows["repeated steps"] == ["0.499", "29:55", "16.6%", "1,795", "updates"]
    assert rows["total"] == ["3.003", "3:00:10", "100.0%"]
    assert shown.endswith("goodput 44.9%: share of the total time in steps that were kept\n")
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == hours(tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere", "file"])
def test_a_folder_without_hours_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="project's folder") as raised:
        report.report_command(report.report_command_parser().parse_args([str(tmp_path / name)]))
    assert str(tmp_path / name) in str(raised.value)


def test_a_disk_that_hangs_does_not_stop_the_loop(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes; the loop notes the ends of its passes meanwhile."""
    writes, goes_on = threading.Event(), threading.Event()

    def put(ledger: Ledger, line: bytes) -> None:
        writes.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(Ledger, "_put", put)
    thread = threading.Thread(target=loop.ledger._write)
    thread.start()
    assert writes.wait(60)
    loop.ledger.rejoin(None, loop.now)  # would wait for ever
    loop.ledger.enter("evaluation", loop.now)
    assert not goes_on.is_set() and thread.is_alive()
    goes_on.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_compiler_that_is_being_imported_has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread finds the module before its names are in it."""
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", types.ModuleType("torch._dynamo.utils"))
    assert compile_seconds() == 0.0


def two_loops(folder: Path, began: float, first: int, second: int, at: int = 0, **last: Any) -> None:
    """A process with two loops of so many updates; the second goes on from the update ``at``, if that isn't 0."""
    resumed = {"first_update": at, "loads": 1} if at else {}
    write(folder, began, line(10, 0), line(10 + first, first, ended="next"))
    later = began + 10 + first
    write(folder, later, line(10, at, **resumed), line(10 + second, at + second, **{**resumed, **last}))


def test_a_second_loop_of_a_process_does_no_step_again(tmp_path: Path) -> None:
    two_loops(tmp_path, 1000, 20, 30, ended="exit")
    known = found(tmp_path)
    assert (known["starts"], known["lost_updates"], known["seconds"]["lost"]) == (1, 0, 0)
    assert known["seconds"]["step"] == pytest.approx(0.9 * 50)


@pytest.mark.parametrize(("at", "lost"), [(0, 50), (25, 5)])
def test_a_killed_second_loop_is_done_again_with_the_first_one_or_alone(at: int, lost: int, tmp_path: Path) -> None:
    two_loops(tmp_path, 1000, 20, 30)
    if at:  # the script knows that its first loop is over
        resumed = {"first_update": at, "loads": 1}
        write(tmp_path, 1100, line(10, at, **resumed), line(20, at + 10, **resumed))
    else:
        two_loops(tmp_path, 1100, 20, 30)
    known = found(tmp_path)
    assert (known["starts"], known["lost_updates"]) == (2, lost)
    assert known["seconds"]["lost"] == pytest.approx(lost)


def test_a_real_process_with_two_loops_tells_one_start(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    inner = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for _ in range(2):
        watch = accelerator.watch_run(every=5, log=False)
        for _ in range(20):
            loss = model(torch.ones(2, 2)).mean()
            accelerator.backward(loss)
            optimizer.step()
            watch.step(loss)
    accelerator.end_training()
    known = hours(tmp_path)
    assert known is not None
    assert (known["starts"], known["lost_updates"], known["updates"]) == (1, 0, 20)
