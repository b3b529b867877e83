"""A rank raises and takes its time to leave: its exception is the first cause, not the signal by which we end it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accelerate.distributed.failures import Failure, MemoryWatch, first_cause, how_it_ended, report
from accelerate.launch import streams
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.records import EndRecords
from accelerate.launch.streams import OutputStream
from accelerate.launch.supervisor import Rank, Supervisor, _Stop, start_command
from accelerate.launch.torchrun import failures_of

RAISED = 'Traceback (most recent call last):\n  File "/home/me/t.py", line 3, in f\n    x()\nValueError: {}\n'
STOPPED_AT = 1.9
#: How a rank that had raised at 1.0 ended: its exit code, the time, and whether we had stopped it.
LEAVES = {
    "at once": (1, 1.1, False),
    "slowly, by our SIGTERM": (-signal.SIGTERM, 2.0, True),
    "slowly, with its own exit code": (1, 4.0, True),
    "never, by our SIGKILL": (-signal.SIGKILL, 12.0, True),
}
#: How the other one ended: its exit code, the time, and whether it raised.
OTHERS = {
    "raises later": (1, 1.6, True),
    "sys.exit(0)": (0, 1.6, False),
    "sys.exit(3)": (3, 1.6, False),
    "is killed": (-signal.SIGKILL, 1.6, False),
}
PLAN = LaunchPlan("local", (sys.executable,), {}, ({"RANK": "0"}, {"RANK": "1"}), cwd=Path())


@dataclass
class Ended:
    """Ranks that have ended, by a clock of the test's."""

    monkeypatch: pytest.MonkeyPatch
    ranks: list[Rank] = field(default_factory=list)

    def add(
        self, returncode: int, ended_at: float, *, raised_at: float | None = None, stopped_at: float | None = None
    ) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        rank, errors = len(self.ranks), OutputStream(read_end, lambda _: None)
        if raised_at is not None:
            os.write(write_end, RAISED.format(f"of rank {rank}").encode())
            self.monkeypatch.setattr(streams.time, "monotonic", lambda: raised_at)
            errors.drain()
            self.monkeypatch.undo()
        os.close(write_end)
        self.ranks.append(Rank(rank, 100 + rank, [errors], None, returncode, ended_at, stopped_at=stopped_at))

    def failures(self, received: int | None = None) -> list[Failure]:
        supervisor = Supervisor(PLAN, start_command(PLAN), {}, _stop=_Stop(0.0, received))
        found = [supervisor._failure_of(rank, MemoryWatch()) for rank in self.ranks]
        return [failure for failure in found if failure is not None]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ended]:
    made = Ended(monkeypatch)
    yield made
    for rank in made.ranks:
        rank.streams[0].close()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("leaves", LEAVES)
def test_the_rank_that_raised_first_is_the_cause_however_it_ends(ended: Ended, leaves: str, other: str) -> None:
    code, at, is_stopped = LEAVES[leaves]
    ended.add(code, at, raised_at=1.0, stopped_at=STOPPED_AT if is_stopped else None)
    code, at, raises = OTHERS[other]
    ended.add(code, at, raised_at=1.5 if raises else None)
    failures = ended.failures()
    first = first_cause(failures)
    assert first is not None and (first.rank, first.exit_code, first.stopped) == (0, 1, False)
    text = report(failures, 2)
    assert text.startswith("First cause: rank 0 of 2 ") and "ValueError: of rank 0" in text
    assert "SIGTERM" not in text and "by the launcher" not in text, text
    assert " raised after 1.0 s." in text or " raised and exited with code 1 after 1.0 s." in text, text
    assert how_it_ended(first).startswith("the process raised"), "the run's own record"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("raised_at", [None, 1.0])
def test_a_signal_from_outside_is_named(ended: Ended, number: int, raised_at: float | None) -> None:
    ended.add(-number, 1.2, raised_at=raised_at)
    ended.add(1, 1.6, raised_at=1.5)
    failures = ended.failures()
    first = first_cause(failures)
    assert first is not None and (first.rank, first.exit_code) == (0, 128 + number)
    assert f" was killed by {signal.Signals(number).name} after " in report(failures, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_had_not_raised_is_stopped_and_no_cause(ended: Ended, number: int) -> None:
    ended.add(-number, 2.0, stopped_at=STOPPED_AT)
    ended.add(3, 1.6)
    failures = ended.failures()
    first = first_cause(failures)
    assert first is not None and (first.rank, first.exit_code) == (1, 3)
    assert f"Rank 0 was stopped by the launcher with {signal.Signals(number).name}" in report(failures, 2)


def test_a_signal_that_was_passed_on_gives_the_shells_exit_code(ended: Ended) -> None:
    """The traceback may be one that the script has caught and logged long before."""
    ended.add(-signal.SIGTERM, 2.0, raised_at=1.0, stopped_at=STOPPED_AT)
    first = first_cause(ended.failures(signal.SIGTERM))
    assert first is not None and first.exit_code == 128 + signal.SIGTERM


@dataclass
class AgentsFailure:
    """A failed rank, as torch's agent keeps it."""

    exitcode: int
    timestamp: float
    raised_at: float | None = None
    pid: int = 100
    error_file: str = "<N/A>"

    @property
    def error_file_data(self) -> Mapping[str, Any]:
        if self.raised_at is None:
            return {"message": "<NONE>"}
        return {"message": {"extraInfo": {"py_callstack": RAISED.format("recorded"), "seconds": self.raised_at}}}


@pytest.mark.parametrize(
    ("found", "cause", "exit_code", "stopped"),
    [
        # The agent lists first what it saw first, then the ranks that it stopped.
        ({1: AgentsFailure(1, 5, 5.5), 0: AgentsFailure(-15, 5, 5.0)}, 0, 1, []),
        ({1: AgentsFailure(1, 5, 5.5), 0: AgentsFailure(-9, 5, 5.0)}, 0, 1, []),
        ({1: AgentsFailure(3, 6), 0: AgentsFailure(-15, 5, 5.0)}, 0, 1, []),
        ({1: AgentsFailure(-9, 6), 0: AgentsFailure(-15, 5, 5.0)}, 0, 1, []),
        ({1: AgentsFailure(3, 6), 0: AgentsFailure(-15, 6)}, 1, 3, [0]),
        ({1: AgentsFailure(-15, 6), 0: AgentsFailure(-15, 6)}, 1, 143, [0]),  # by somebody else's SIGTERM
        ({1: AgentsFailure(-15, 6, 5.0), 0: AgentsFailure(1, 6, 5.5)}, 1, 143, []),
    ],
)
def test_torchs_agent_has_the_same_first_cause(
    found: dict[int, AgentsFailure], cause: int, exit_code: int, stopped: list[int]
) -> None:
    failures = failures_of(found, 1.0, EndRecords())
    first = first_cause(failures)
    assert first is not None and (first.rank, first.exit_code) == (cause, exit_code)
    assert [failure.rank for failure in failures if failure.stopped] == stopped
