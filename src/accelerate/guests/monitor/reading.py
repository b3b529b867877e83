"""The files of a run, read as they grow: each rank's reports and events, and the numbers that the script logged.

In a run of many ranks, only some files are read completely: those of the main rank, of evenly spaced ranks, and of
ranks that stand out. From all other files, only the newest report and the events near it are read, for some of the
files at each refresh.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast, final

from ...errors import SettingError
from .document import Event, Facts, Output, RunNote
from .records import ENDINGS, FILE_PATTERN, FOLDER

#: Patterns for log files below the run's folder (`accelerate launch --log_dir` writes ``<folder>/<rank>/stderr.log``).
_PATTERNS: Final = ("*.log", "*.out", "*.err", "*/*.log", "*/*/*.log", "*/*/*/*.log")
_SEARCH_SECONDS: Final = 10.0
_BYTES: Final = 32768
_NUM_LINES: Final = 200


@final
class OutputTail:
    """The tail of the newest log file in ``folder``; the newest file is searched every ten seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._size = 0
        self._next_search = 0.0

    def refresh(self) -> bool:
        """Check the file, and return whether another file is the newest, or it has new lines."""
        before = (self._path, self._size)
        if time.monotonic() >= self._next_search:
            self._next_search = time.monotonic() + _SEARCH_SECONDS
            self._path = max(self._files(), default=(0.0, None), key=lambda found: found[0])[1]
        try:
            self._size = 0 if self._path is None else self._path.stat().st_size
        except OSError:  # it was removed
            self._path = None
        return before != (self._path, self._size)

    def _files(self) -> Iterator[tuple[float, Path | None]]:
        for pattern in _PATTERNS:
            for path in self._folder.glob(pattern):
                try:
                    status = path.stat()
                except OSError:  # removed in the meantime
                    continue
                if status.st_size and path.is_file():
                    yield status.st_mtime, path

    def read(self) -> Output | None:
        """Return the last lines; None without a log file."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._size - _BYTES))
                text = file.read(_BYTES).decode(errors="replace")
        except OSError:
            return None
        lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]  # keep a progress bar's last state
        return {"file": self._path.relative_to(self._folder).as_posix(), "lines": lines[-_NUM_LINES:]}


_PREFIX, _SUFFIX = FILE_PATTERN.split("{}")
#: The known numbers in a rank's reports; all others are the user's own.
KNOWN: Final = (
    "loss", "learning_rate", "step_seconds", "wait_seconds", "samples_per_second", "tokens_per_second", "memory_bytes",
    "mfu", "gradient_norm", "device_utilization",
)  # fmt: skip
_NO_CURVES: Final = frozenset({"time", "step", "epoch", "total_steps", "eta_seconds", *KNOWN})
_MAX_EVENTS: Final = 2000
#: The maximum number of ranks whose files are all read completely.
MAX_WHOLE: Final = 256
#: With more ranks: the minimum number of evenly spaced ranks to follow, and the maximum of ranks that stood out.
_NUM_SAMPLED: Final = 16
_MAX_CHOSEN: Final = 32
#: One in this number of other ranks' files is read per refresh; only at its end if it has this much new content.
_NUM_TURNS: Final = 16
_END_BYTES: Final = 4096
_STALE_SECONDS: Final = 40.0
#: Events that all ranks report identically, shown once.
SAME_ON_ALL_RANKS: Final = ("epoch", "save", "load", "stop", "start", "restart", "end", "preempted")


def number(value: object) -> float | None:
    """Return ``value`` as a number, including NaN and infinities (text in the files); None for other values."""
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
    """One number over the steps of a run; after a resume from an earlier step, new values replace the later ones."""

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
    """A reader of the complete lines added to a file since the last read."""

    def __init__(self, path: str | Path) -> None:
        self.path: str = os.fspath(path)
        self.offset: int = 0  # the number of bytes read or skipped

    def lines(self, *, ends_only: bool = False, until: int | None = None) -> Iterator[Facts]:
        """Yield new lines that are JSON objects; an incomplete last line is left for the next call.

        Args:
            ends_only: if there is much new content, read only the file's first line, the last report, and events near
                it.
            until: the offset in the file at which to stop.
        """
        lines = self._new_ends() if ends_only else self._whole(self._read(until))
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:  # a torn line: the process died inside it
                continue
            if isinstance(found, dict):
                yield cast("Facts", found)

    def _read(self, until: int | None = None, *, most: int | None = None) -> bytes:
        """Return the new bytes; if there are more than ``most``, the first and the last ones, as complete lines."""
        try:
            size = os.stat(self.path).st_size if until is None else until
            if size == self.offset:
                return b""
            with open(self.path, "rb", buffering=0) as file:
                if size < self.offset:  # written anew
                    self.offset = 0
                if most is not None and size - self.offset > 2 * most:
                    first = b"" if self.offset else file.read(most).partition(b"\n")[0] + b"\n"
                    begin = file.seek(size - most)
                    data = file.readall()
                    last = data.partition(b"\n")[2]
                    if b"\n" in last:
                        self.offset = begin + len(data) - len(first) - len(last)
                        return first + last
                file.seek(self.offset)
                return file.readall() if until is None else file.read(until - self.offset)
        except OSError:
            return b""

    def _whole(self, data: bytes) -> list[bytes]:
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[:end].splitlines()

    def _new_ends(self) -> list[bytes]:
        """Return the new events and the last new report, if they are in the last few kilobytes."""
        found: list[bytes] = []
        report: bytes | None = None
        for line in self._whole(self._read(most=_END_BYTES)):
            if b'"event"' in line:
                found.append(line)
            else:
                report = line
        return found if report is None else [*found, report]


@final
@dataclass
class Rank:
    """The reports and events of one rank so far."""

    number: int
    facts: Facts = field(default_factory=Facts)
    newest: Facts = field(default_factory=Facts)
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    times: Curve = field(default_factory=Curve)  # when each step was reported, and in which epoch
    epochs: Curve = field(default_factory=Curve)
    starts: int = 0
    ending: str | None = None  # the event that ended it, once there was one
    first_time: float = 0.0
    last_time: float = 0.0
    is_followed: bool = True  # its whole file is read, and its curves are kept

    def take(self, line: Facts) -> Event | None:
        """Process one line of the rank's file, and return its event if it is one."""
        self.last_time = max(self.last_time, number(line.get("time")) or 0.0)
        self.first_time = self.first_time or self.last_time
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
            for curve in (self.times, self.epochs, *self.curves.values()):
                curve.cut(int(number(line.get("step")) or 0) + 1)
        elif kind in ENDINGS and self.ending not in ("stop", "preempted"):
            self.ending = str(kind)
        return event

    def _report(self, line: Facts) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        self.newest = dict(line)
        if not self.is_followed:
            return
        for name, curve in (("time", self.times), ("epoch", self.epochs)):
            if (known := number(line.get(name))) is not None:
                curve.add(step, known)
        for name, value in line.items():
            found = number(value)
            if found is not None and (name in KNOWN or name not in _NO_CURVES):
                self.curves.setdefault(name, Curve()).add(step, found)


@final
@dataclass
class Reported:
    """An event, and all ranks that have reported the same."""

    event: Event
    ranks: dict[int, None] = field(default_factory=dict[int, None])

    @property
    def time(self) -> float:
        """The time at which the first rank reported it, among the files read."""
        return self.event.get("time", 0.0)


def no_folder(folder: Path) -> SettingError:
    """Return the error for a run's folder that isn't one."""
    return SettingError(
        f"{folder} is {'not a folder' if folder.exists() else 'not there'}. Give the project's folder: what "
        "Accelerator(project_dir=...) of the run says."
    )


@final
class RunFiles:
    """A run as described by its files; :meth:`refresh` reads new content.

    Args:
        may_come: a missing folder counts as an empty one.

    Raises:
        SettingError: ``folder`` isn't a folder.
    """

    def __init__(self, folder: Path, *, may_come: bool = False) -> None:
        if not folder.is_dir() and (folder.exists() or not may_come):
            raise no_folder(folder)
        self.folder: Path = folder.resolve()
        self.logs: Path = self.folder  # the folder of the files that the script logs to
        self.ranks: dict[int, Rank] = {}
        self.logged: dict[str, Curve] = {}
        self.config: Facts = {}  # the configuration that the script passed to its trackers
        self.note: Facts = {}  # the name, tags and note that were given on the page
        self.output = OutputTail(self.folder)
        self.version: int = 0
        self._tails: dict[str, Tail] = {}
        self._events: dict[tuple[object, ...], Reported] = {}
        self._chosen: set[int] = set()
        self._turn = 0

    @property
    def is_large(self) -> bool:
        """Whether there are too many ranks to read all files completely and to list them."""
        return len(self.ranks) > MAX_WHOLE

    @property
    def sample(self) -> set[int]:
        """The ranks whose files are always read completely: all ranks, or in a large run evenly spaced ones."""
        if not self.is_large:
            return set(self.ranks)
        stride = 1 << (len(self.ranks) // _NUM_SAMPLED).bit_length() - 1  # with more ranks, the sample only shrinks
        return {min(self.ranks), *(number for number in self.ranks if number % stride == 0)}

    def refresh(self) -> bool:
        """Read new content of the files, and return whether there was any.

        In a large run, it reads the files of the followed ranks, of one in sixteen others, and of all that seem silent.
        """
        before, paths, stale = self.version, self._rank_files(), time.time() - _STALE_SECONDS
        for number in paths.values():
            if number not in self.ranks:
                self.ranks[number] = Rank(number)
        followed = self.sample | self._chosen
        for index, (path, number) in enumerate(paths.items()):
            rank, tail = self.ranks[number], self._tails.setdefault(path, Tail(path))
            if (number in followed) != rank.is_followed:
                self._set_followed(rank, tail, number in followed)
            is_stale = rank.last_time < stale and rank.ending is None  # it may only seem silent
            if rank.is_followed or is_stale or index % _NUM_TURNS == self._turn:
                self._read_rank(rank, tail)
        self._turn = (self._turn + 1) % _NUM_TURNS
        if len(self._events) > 2 * _MAX_EVENTS:
            self._events = dict(sorted(self._events.items(), key=lambda each: each[1].time)[-_MAX_EVENTS:])
        self.logs = _logs_beside(paths) or self.folder
        for path in sorted(self.logs.glob("*.jsonl")):
            if str(path) not in paths:
                for line in self._tails.setdefault(str(path), Tail(path)).lines():
                    self.version += self._take_logged(line)
        self.version += self.output.refresh()
        return self.version != before

    def choose(self, numbers: Iterable[int]) -> None:
        """Also follow these ranks from now on, while there is room."""
        new = set(numbers) - self._chosen
        if new and len(self._chosen) < _MAX_CHOSEN:
            self._chosen.update(sorted(new)[: _MAX_CHOSEN - len(self._chosen)])
            self.refresh()

    def _rank_files(self) -> dict[str, int]:
        """Return the ranks' files in the run's folder, in the folder of its logs, or in this folder itself."""
        for folders in ([self.folder / FOLDER], sorted(self.folder.glob(f"*/{FOLDER}")), [self.folder]):
            if found := {path: number for folder in folders for path, number in _rank_files_in(folder)}:
                return dict(sorted(found.items(), key=lambda each: each[1]))
        return {}

    def _set_followed(self, rank: Rank, tail: Tail, is_followed: bool) -> None:
        """Start to keep the curves of a rank, including skipped parts of its file; or drop them."""
        rank.is_followed = is_followed
        rank.curves.clear()
        rank.times, rank.epochs = Curve(), Curve()
        if is_followed:
            past = Rank(rank.number)
            for line in Tail(tail.path).lines(until=tail.offset):
                past.take(line)
            rank.curves, rank.starts = past.curves, past.starts
            rank.times, rank.epochs = past.times, past.epochs

    def _read_rank(self, rank: Rank, tail: Tail) -> None:
        for line in tail.lines(ends_only=not rank.is_followed):
            self.version += 1
            event = rank.take(line)
            if event is not None and (rank.is_followed or event["event"] not in SAME_ON_ALL_RANKS):
                self._note(event)

    def _note(self, event: Event) -> None:
        """Keep an event, merged with equal events of other ranks."""
        kind = event["event"]
        key: tuple[object, ...] = (self.version,)
        if kind in SAME_ON_ALL_RANKS:
            key = (kind, event.get("step"), event.get("epoch"), event.get("folder"), event.get("attempt"))
        elif self.is_large:
            key = (kind, event.get("step"), event.get("text"))
        self._events.setdefault(key, Reported(event)).ranks[event["rank"]] = None

    @property
    def events(self) -> list[Reported]:
        """The newest events, the newest last."""
        return sorted(self._events.values(), key=lambda each: each.time)[-_MAX_EVENTS:]

    def _take_logged(self, line: Facts) -> bool:
        """Process a line of a log (configuration, note, or a step's numbers); return whether it is one."""
        if isinstance(note := line.get("note"), dict):
            self.note = cast("Facts", note)
            return True
        if isinstance(config := line.get("config"), dict):
            self.config = cast("Facts", config)
            return True
        step = line.get("step")
        if not isinstance(step, int):
            return False
        for name, value in line.items():
            found = number(value)
            if found is not None and name not in _NO_CURVES:
                self.logged.setdefault(name, Curve()).add(step, found)
        return True

    @property
    def last_time(self) -> float:
        """The time of the last write of any rank; 0 without ranks."""
        return max((rank.last_time for rank in self.ranks.values()), default=0.0)

    @property
    def main(self) -> Rank:
        """The rank with the smallest number, whose loss and rates are those of all; an empty one without ranks."""
        return self.ranks[min(self.ranks)] if self.ranks else Rank(0)


def _logs_beside(rank_files: Iterable[str]) -> Path | None:
    """Return the folder in which the script logs, given the files of its ranks."""
    folder = next((Path(path).parent for path in rank_files), None)
    return folder.parent if folder is not None and folder.name == FOLDER else folder


def _rank_files_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of each rank's file in ``folder``, which need not exist."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        number = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if number.isdigit() and len(number) + len(_PREFIX) + len(_SUFFIX) == len(name):
            yield f"{folder}{os.sep}{name}", int(number)


def finite(value: float | None) -> float | None:
    """Return ``value`` if JSON can represent it, else None."""
    return value if value is not None and math.isfinite(value) else None


# --------------------------------------------------------------------------------------------------
# The name, tags and note of a run, given by its script or on its page

#: The file of edited notes, beside the script's own logs. The last line counts.
FILE: Final = "notes.jsonl"


def note_of(run: RunFiles) -> RunNote:
    """Return the name, tags and note of ``run``, each empty if it has none.

    A script gives them as ``run_name``, ``tags`` and ``notes`` of its trackers' configuration.
    """
    config = run.config
    given = {"name": config.get("run_name"), "tags": config.get("tags"), "note": config.get("notes")}
    return _checked({**given, **run.note})


def write_note(run: RunFiles, content: object) -> None:
    """Write ``content`` as the note of ``run``.

    Raises:
        ValueError: it isn't an object.
        OSError: the folder can't be written.
    """
    if not isinstance(content, dict):
        raise ValueError("a note is an object with name, tags and note")
    line = {"time": round(time.time(), 3), "note": _checked(cast("Facts", content))}
    with (run.logs / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _checked(given: Mapping[str, object]) -> RunNote:
    name, tags, note = given.get("name"), given.get("tags"), given.get("note")
    return {
        "name": name.strip() if isinstance(name, str) else "",
        "tags": [str(tag) for tag in cast("list[object]", tags)] if isinstance(tags, list) else [],
        "note": note.strip() if isinstance(note, str) else "",
    }
