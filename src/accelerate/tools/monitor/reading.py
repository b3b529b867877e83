"""The files of a run, read as they grow: each rank's reports and events, and the numbers that the script logged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast, final

from ...errors import SettingError
from ...monitoring.records import FILE_PATTERN, FOLDER
from .document import Event, Facts

_FILES: Final = FILE_PATTERN.format("*")
_PREFIX: Final = FILE_PATTERN.partition("{")[0]
#: The numbers of a rank's reports that are drawn by name; all others are the user's own.
KNOWN: Final = (
    "loss", "learning_rate", "step_seconds", "wait_seconds", "samples_per_second", "tokens_per_second", "memory_bytes",
    "mfu",
)  # fmt: skip
_NO_CURVES: Final = frozenset({"time", "step", "epoch", "total_steps", "eta_seconds", *KNOWN})
_MAX_EVENTS: Final = 2000


def number(value: object) -> float | None:
    """Return ``value`` as a number, NaN and infinities (text in the files) included; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


@final
@dataclass
class Curve:
    """One number over the steps of a run; a run that resumes from an earlier step replaces what follows it."""

    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])

    def add(self, step: int, value: float) -> None:
        """Add the value at ``step``, and drop those of the same and later steps."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Drop the values at ``step`` and later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()


@final
class Tail:
    """A reader of the whole lines that were added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> Iterator[Facts]:
        """Yield new lines that are JSON objects; a half-written last one is left for the next time."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # written anew
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            try:
                found = json.loads(line)
            except ValueError:  # a torn line: the process died inside it
                continue
            if isinstance(found, dict):
                yield cast("Facts", found)


@final
@dataclass
class Rank:
    """The reports and events of one rank so far."""

    number: int
    facts: Facts = field(default_factory=Facts)
    newest: Facts = field(default_factory=Facts)
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    starts: int = 0
    ending: str | None = None  # the event that ended it, once there was one
    last_time: float = 0.0

    def take(self, line: Facts) -> Event | None:
        """Process one line of the rank's file, and return its event if it is one."""
        self.last_time = max(self.last_time, number(line.get("time")) or 0.0)
        kind = line.get("event")
        if kind is None:
            self._report(line)
            return None
        event = cast("Event", {**line, "rank": self.number})
        if kind == "start":
            self.starts += 1
            self.ending = None
            self.facts = {name: value for name, value in line.items() if name not in ("time", "event")}
            event["attempt"] = self.starts
            if self.starts > 1:
                event["event"] = "restart"
        elif kind == "load":
            for curve in self.curves.values():
                curve.cut(int(number(line.get("step")) or 0) + 1)
        elif kind in ("end", "error"):
            self.ending = "stop" if self.ending == "stop" else str(kind)
        elif kind == "stop":
            self.ending = "stop"
        return event

    def _report(self, line: Facts) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        self.newest = dict(line)
        for name, value in line.items():
            found = number(value)
            if found is not None and (name in KNOWN or name not in _NO_CURVES):
                self.curves.setdefault(name, Curve()).add(step, found)


@final
class RunFiles:
    """A run as described by its files; :meth:`refresh` reads what is new.

    Raises:
        SettingError: ``folder`` isn't a folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingError(
                f"{folder} is {'not a folder' if folder.exists() else 'not there'}. Give the project's folder: what "
                "Accelerator(project_dir=...) of the run says."
            )
        self.folder: Path = folder.resolve()
        self.ranks: dict[int, Rank] = {}
        self.events: list[Event] = []
        self.logged: dict[str, Curve] = {}
        self.version: int = 0
        self._tails: dict[Path, Tail] = {}

    def refresh(self) -> bool:
        """Read what the files have gained, and return whether that was anything."""
        before = self.version
        for path in self._rank_files():
            rank = self.ranks.setdefault(_rank_of(path), Rank(_rank_of(path)))
            for line in self._tail(path).lines():
                self.version += 1
                event = rank.take(line)
                if event is not None:
                    self._note(event)
        for path in sorted(self.folder.glob("*.jsonl")):
            if path.parent.name != FOLDER:
                for line in self._tail(path).lines():
                    self.version += self._take_logged(line)
        return self.version != before

    def _rank_files(self) -> list[Path]:
        """Return the ranks' files of the run's folder, of the folder of its logs, or of this very folder."""
        for pattern in (f"{FOLDER}/{_FILES}", f"*/{FOLDER}/{_FILES}", _FILES):
            found = [path for path in self.folder.glob(pattern) if path.stem.removeprefix(_PREFIX).isdigit()]
            if found:
                return sorted(found, key=_rank_of)
        return []

    def _tail(self, path: Path) -> Tail:
        return self._tails.setdefault(path, Tail(path))

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.events.sort(key=lambda each: each.get("time", 0.0))
        del self.events[:-_MAX_EVENTS]

    def _take_logged(self, line: Facts) -> bool:
        """Process a line that the script logged with ``accelerator.log(..., step=...)``, and return whether it has a
        step.
        """
        step = line.get("step")
        if not isinstance(step, int):
            return False
        for name, value in line.items():
            found = number(value)
            if found is not None and name not in _NO_CURVES:
                self.logged.setdefault(name, Curve()).add(step, found)
        return True

    @property
    def main(self) -> Rank | None:
        """The rank with the smallest number, whose loss and rates are those of all ranks."""
        return self.ranks[min(self.ranks)] if self.ranks else None


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix(_PREFIX))


def finite(value: float | None) -> float | None:
    """Return ``value`` where JSON can hold it, else None."""
    return value if value is not None and math.isfinite(value) else None
