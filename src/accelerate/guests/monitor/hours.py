"""``accelerate report RUN``: how the time of a run was spent, over all its starts, from the ledgers of its processes.

A process's own file says how it spent its time. The time between two processes follows from their times, and the
repeated steps from the update at which a later process resumed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, final

from ...commands.parser import Subparsers, command_parser
from ...errors import SettingError
from ...watching import format_duration
from .document import Hours
from .ledger import (
    COMPILE,
    DATA_WAIT,
    EVALUATION,
    FOLDER,
    HANG,
    NEXT,
    SAVE,
    SHUTDOWN,
    START_UP,
    STEP,
)
from .reading import no_folder, number
from .records import FOLDER as RECORDS

LOST: Final = "lost"
IDLE: Final = "idle"
#: The shown kinds in order, with their labels.
KINDS: Final = {
    STEP: "steps",
    DATA_WAIT: "waiting for data",
    EVALUATION: "evaluation",
    SAVE: "saving",
    START_UP: "start-up",
    COMPILE: "compiling",
    LOST: "repeated steps",
    HANG: "hanging",
    IDLE: "downtime",
    SHUTDOWN: "shutdown",
}
#: The kinds of time that are lost when steps are repeated.
_WORK: Final = (STEP, DATA_WAIT)


class Line(NamedTuple):
    """The account of a process at one instant."""

    began: float
    elapsed: float
    pid: int
    updates: int
    first_update: int
    loads: int
    ended: str | None
    seconds: dict[str, float]

    @property
    def time(self) -> float:
        """The time of writing."""
        return self.began + self.elapsed


@final
@dataclass
class Stretch:
    """The updates from a loop's beginning, or from a loaded checkpoint, to the next load or the loop's end.

    Attributes:
        is_next_loop: it begins a loop that isn't the first one of its process.
    """

    first_update: int
    is_next_loop: bool = False
    lines: list[Line] = field(default_factory=list[Line])

    @property
    def updates(self) -> int:
        """The number of updates at its end."""
        return self.lines[-1].updates

    @property
    def has_worked(self) -> bool:
        """Whether it contains an update."""
        return self.updates > self.first_update

    def work_after(self, update: int) -> dict[str, float]:
        """Return the seconds by kind of the steps after the first ``update`` updates."""
        last = self.lines[-1]
        return {kind: max(0.0, last.seconds.get(kind, 0.0) - self._at(update, kind)) for kind in _WORK}

    def _at(self, update: int, kind: str) -> float:
        """Return the seconds of ``kind`` up to ``update``, interpolated linearly between two lines."""
        before = self.lines[0]
        for line in self.lines:
            known = line.seconds.get(kind, 0.0)
            if line.updates >= update:
                share = (update - before.updates) / (line.updates - before.updates) if line is not before else 1.0
                earlier = before.seconds.get(kind, 0.0)
                return earlier + share * (known - earlier)
            before = line
        return before.seconds.get(kind, 0.0)


def hours(folder: Path) -> Hours | None:
    """Return how the time of the run in this project's folder was spent; None without a ledger."""
    processes = _newest_run(read_ledgers(folder))
    if not processes:
        return None
    seconds = dict.fromkeys(KINDS, 0.0)
    for lines in processes:
        for kind, spent in lines[-1].seconds.items():
            seconds[kind] = seconds.get(kind, 0.0) + spent
    for before, after in itertools.pairwise(processes):
        seconds[IDLE] += max(0.0, after[0].began - before[-1].time)
    follows = [False, *(_is_next_loop(before, after) for before, after in itertools.pairwise(processes))]
    parts = [part for lines, is_next in zip(processes, follows, strict=True) for part in stretches(lines, is_next)]
    lost_updates = _move_lost(parts, seconds)
    wall = max(lines[-1].time for lines in processes) - processes[0][0].began
    return {
        "began": processes[0][0].began,
        "wall_seconds": wall,
        "seconds": seconds,
        "goodput": seconds[STEP] / wall if wall > 0 else 0.0,
        "starts": follows.count(False),
        "updates": processes[-1][-1].updates,
        "lost_updates": lost_updates,
    }


def _move_lost(parts: Sequence[Stretch], seconds: dict[str, float]) -> int:
    """Count the steps that a later stretch has repeated as lost, and return their number."""
    done_again, lost_updates = float("inf"), 0
    for part in reversed([part for part in parts if part.has_worked]):
        if done_again < part.updates:
            first = int(max(done_again, part.first_update))
            lost_updates += part.updates - first
            for kind, spent in part.work_after(first).items():
                seconds[kind] -= spent
                seconds[LOST] += spent
        if not part.is_next_loop:
            done_again = min(done_again, part.first_update)
        elif done_again > part.first_update:  # a part of this loop counts, so the whole previous loop does
            done_again = float("inf")
    return lost_updates


def _is_next_loop(before: Sequence[Line], lines: Sequence[Line]) -> bool:
    """Return whether a loop follows another loop of the same process."""
    return before[-1].ended == NEXT and before[-1].pid == lines[0].pid


def stretches(lines: Sequence[Line], is_next_loop: bool = False) -> list[Stretch]:
    """Return the parts of one loop between its loaded checkpoints."""
    found: list[Stretch] = []
    for before, line in zip([None, *lines], lines, strict=False):
        if before is None or line.loads != before.loads:
            found.append(Stretch(line.first_update, is_next_loop and line.loads == 0))
        found[-1].lines.append(line)
    return found


def _newest_run(processes: Sequence[list[Line]]) -> list[list[Line]]:
    """Return the processes since one started from scratch after another had finished."""
    begin, has_ended = 0, False
    for index, lines in enumerate(processes):
        worked = next((part for part in stretches(lines) if part.has_worked), None)
        if has_ended and worked is not None and worked.first_update == 0:
            begin = index
        if worked is not None or has_ended is False:
            has_ended = lines[-1].ended in ("end", "exit")
    return list(processes[begin:])


def read_ledgers(folder: Path) -> list[list[Line]]:
    """Return the lines of each process's ledger of the run in ``folder``, both sorted by time."""
    places = (folder / RECORDS / FOLDER, *sorted(folder.glob(f"*/{RECORDS}/{FOLDER}")), folder / FOLDER)
    files = next((found for place in places if (found := sorted(place.glob("*.jsonl")))), [])
    return sorted((lines for file in files if (lines := _read(file))), key=lambda lines: lines[0].began)


def _read(file: Path) -> list[Line]:
    try:
        found = file.stat()
        return _lines_of(file, found.st_mtime_ns, found.st_size)
    except OSError:
        return []


@functools.lru_cache(maxsize=4096)
def _lines_of(file: Path, _changed: int, _size: int) -> list[Line]:
    """Return the lines of a file, cached until it changes."""
    text = file.read_bytes()
    return sorted(
        (line for each in text.splitlines() if (line := _line(each))), key=lambda line: (line.elapsed, line.loads)
    )


def _line(text: bytes) -> Line | None:
    """Return the parsed line of a file; None for a torn line, or one of another version."""
    try:
        found = cast("dict[str, Any]", json.loads(text.strip(b"\0")))
        seconds = {kind: known for kind, each in found["seconds"].items() if (known := number(each)) is not None}
        return Line(
            float(found["began"]), float(found["elapsed"]), int(found["pid"]), int(found["updates"]),
            int(found["first_update"]), int(found["loads"]), found["ended"], seconds,
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# --------------------------------------------------------------------------------------------------
# The command `accelerate report`

_DESCRIPTION = (
    "Say where the hours of a run went: steps, waiting for data, saving, starting, repeated steps after a "
    "restart, and the time until it. A run keeps a ledger if it is started with `accelerate launch --monitor`, or its "
    "script calls `run = accelerator.watch_run()` and `run.step(loss)`."
)


def report_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate report``."""
    parser = command_parser("report", _DESCRIPTION, subparsers)
    parser.add_argument("run", type=Path, help="The project's folder: the run's Accelerator(project_dir=...).")
    parser.add_argument("--json", action="store_true", help="Print an object for programs.")
    parser.set_defaults(func=report_command)
    return parser


def report_command(args: argparse.Namespace) -> int:
    """Print the table and return 0.

    Raises:
        SettingError: the folder doesn't exist, or has no ledger.
    """
    if not args.run.is_dir():
        raise no_folder(args.run)
    found = hours(args.run)
    if found is None:
        raise SettingError(
            f"{args.run} has no ledger of hours (monitor/ledger). A run keeps one in its project's folder if it "
            "is started with `accelerate launch --monitor`, or its script calls `run = accelerator.watch_run()`."
        )
    print(json.dumps(found, indent=2) if args.json else table(found))
    return 0


def table(found: Hours) -> str:
    """Return the hours as readable lines, without kinds that took no time."""
    wall = found["wall_seconds"]
    starts = f"{found['starts']} start{'s' * (found['starts'] != 1)}"
    lines = [f"{found['updates']:,} updates, {starts}, {format_duration(wall)} wall-clock time"]
    lines += ["", f"{'':<22}{'hours':>10}{'time':>12}{'%':>8}"]
    for kind, words in KINDS.items():
        spent = found["seconds"].get(kind, 0.0)
        if spent > 0:
            more = f"   {found['lost_updates']:,} updates" if kind == LOST else ""
            lines.append(f"{words:<22}{_row(spent, wall)}{more}")
    lines.append(f"{'total':<22}{_row(sum(found['seconds'].values()), wall)}")
    lines += ["", f"goodput {found['goodput']:.1%}: share of the total time in steps that were kept"]
    return "\n".join(lines)


def _row(seconds: float, wall: float) -> str:
    return f"{seconds / 3600:>10.3f}{format_duration(seconds):>12}{seconds / wall if wall else 0.0:>8.1%}"
