"""Failures of a run: how each process failed, which failure came first, and a short report.

A launcher knows three things about a process: its stderr, its exit code, and its peak memory. They make a
:class:`Failure`; :func:`first_cause` selects the first one; :func:`report` formats them. :class:`MemoryWatch` reads the
kernel's counters. This module needs neither torch nor processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import final

from ..callers import is_in_this_package, is_own
from ..settings.preemption import PREEMPTED_EXIT_CODE
from ..wording import by_number, some_ranks

#: Environment variable: the folder in which ranks write records for their launcher.
RECORDS_VARIABLE = "ACCELERATE_RECORDS_FOLDER"
_LOGS = "log_dir"
LOGS_HINT = "The whole output of rank {rank} is above; for one file per rank: accelerate launch --log_dir DIRECTORY ..."
TRACEBACK_START = "Traceback (most recent call last):"

_FRAME = re.compile(r'^\s*(?:\|\s*)?File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
#: torch marks every line of a traceback with the rank: ``[rank1]: ``
_PREFIX = re.compile(r"(\[[^\]\s]+\]: ?)(?:Original )?$")  # "Original": raised by a DataLoader worker
#: An exception group prints its frames and its members after bars: ``  | ``, ``  +-+---- 1 ----``, ``    | ``.
_GROUP_START = re.compile(
    r"^(?P<prefix>(?:\[[^\]\s]+\]: )?) +\+ Exception Group Traceback \(most recent call last\):", re.MULTILINE
)
_IN_GROUP = re.compile(r"^\s+(?:\| ?|\+[-+]?)")
_MARKERS = re.compile(r"^\s*[~^\s]+$")
#: Messages that report that another process went away: a consequence, never a first cause.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|aborted|refused)|broken pipe|remote process exited|"
    r"socket (?:closed|timeout)|recvvalue failed|failed to recv|heartbeat|monitoredbarrier|"
    r"has ended \(or left the world\)|keeps the ranks' store",
    re.IGNORECASE,
)
#: Messages that report that another process didn't come in time.
_TIMED_OUT = re.compile(r"timed out|has waited \d+ s for the others", re.IGNORECASE)
#: Files in which torch and this package communicate; autograd raises the errors of collectives in a backward pass.
_COMMUNICATION = re.compile(r"[/\\]torch[/\\](?:distributed|autograd)[/\\]")
_COMMUNICATION_ERROR = re.compile(r"torch\.distributed\.Dist\w*Error\b|(?:accelerate\.errors\.)?CollectiveError\b")
#: A launcher may notice the end of a rank this much later than another rank does.
_NOTICED_SECONDS = 2.0
_SHOWN_FRAMES = 3
_SHOWN_MESSAGE_LINES = 3
#: Width of lines about ranks that failed later; lines about the first cause are never cut.
_LINE_WIDTH = 160
#: The line below the traceback of a rank that has lost another one; the pattern's group is the collective.
OWN_COLLECTIVE = "This rank's last collective (torch's flight record): "
_OWN_COLLECTIVE = re.compile(re.escape(OWN_COLLECTIVE) + r"(?P<collective>.+)\.$", re.MULTILINE)


@final
@dataclass(frozen=True)
class Frame:
    """One line of a traceback: its position, and the source text if it was printed."""

    file: str
    line: int
    function: str = ""
    source: str = ""

    @property
    def is_own(self) -> bool:
        """Whether this is the user's code, not a library's."""
        return is_own(self.file)


@final
@dataclass(frozen=True)
class Traceback:
    """The last traceback that a process printed."""

    frames: tuple[Frame, ...]
    message: str

    @property
    def exception(self) -> str:
        """The first line of the message: the exception's type and its text."""
        return self.message.partition("\n")[0]

    @property
    def shown_frames(self) -> tuple[Frame, ...]:
        """The frames to show: the user's innermost ones, then the one that raised."""
        own = tuple(frame for frame in self.frames if frame.is_own)
        if not own or own[-1] == self.frames[-1]:
            return (own or self.frames)[-_SHOWN_FRAMES:]
        return (*own[1 - _SHOWN_FRAMES :], self.frames[-1])


def parse_traceback(text: str) -> Traceback | None:
    """Return the last complete traceback in ``text``, or None."""
    text = _flattened(text)
    start = text.rfind(TRACEBACK_START)
    if start < 0:
        return None
    frames: list[Frame] = []
    message: list[str] = []
    prefix = _PREFIX.search(text[text.rfind("\n", 0, start) + 1 : start])
    for printed in text[start + len(TRACEBACK_START) :].splitlines()[1:]:
        line = printed if prefix is None else printed.removeprefix(prefix[1]).removeprefix(prefix[1].rstrip())
        if prefix is not None and line is printed:  # a line without torch's mark isn't part of it
            break
        match = _FRAME.match(line)
        if match and not message:
            frames.append(Frame(match["file"], int(match["line"]), match["function"] or ""))
        elif line[:1].isspace() and not message:
            if frames and not frames[-1].source and line.strip() and not _MARKERS.match(line):
                last = frames[-1]
                frames[-1] = Frame(last.file, last.line, last.function, line.strip())
        elif line.strip() or message:
            message.append(line.rstrip())
    if not message:
        return None
    return Traceback(tuple(frames), "\n".join(message).rstrip())


def _flattened(text: str) -> str:
    """Rewrite the last exception group's traceback as that of one exception, with the messages of group and members."""
    found = list(_GROUP_START.finditer(text))
    if not found:
        return text
    start = found[-1]
    lines: list[str] = []
    is_member = False
    rest = text[start.end() :].splitlines()[1:]
    while rest and (bars := _IN_GROUP.match(line := rest[0].removeprefix(start["prefix"]))):
        rest.pop(0)
        line = line[bars.end() :]
        is_border = "+" in bars[0]  # between members
        is_member = is_member or is_border
        if not is_border and not (is_member and (line[:1].isspace() or line.startswith(TRACEBACK_START))):
            lines.append(line)
    return "\n".join([TRACEBACK_START, *lines, *rest])


@final
@dataclass(frozen=True)
class Failure:
    """One rank's failure: how and when it ended, and what it printed."""

    rank: int
    host: str
    pid: int
    #: From ``wait``: a positive exit code, or minus the number of the signal.
    returncode: int
    #: Seconds after the start at which the failure was first seen: its traceback, else its end.
    seconds: float
    traceback: Traceback | None = None
    #: The last lines of stderr, shown if there is no traceback.
    last_lines: tuple[str, ...] = ()
    peak_memory_mib: float | None = None
    #: A sentence about the kernel's memory counters, for a rank that was killed.
    memory: str = ""
    #: The launcher itself sent the signal, because another rank had failed or because it was told to stop.
    stopped: bool = False
    #: The rank had raised and was exiting when the launcher's signal ended it, so its exception is the failure.
    was_leaving: bool = False
    log: Path | None = None
    #: The rank has saved after a preemption notice, and asks to be restarted.
    is_preempted: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether this only reports that another process went away."""
        return self.traceback is not None and is_lost_connection(self.traceback.message)

    @property
    def is_lost_peer(self) -> bool:
        """Whether torch or this package raised this because another rank has ended.

        A script's own connection, such as one to a database, fails with the same words but doesn't count.
        """
        return self.is_consequence and self._is_of_communication

    @property
    def is_timeout(self) -> bool:
        """Whether torch or this package timed out waiting for other ranks."""
        found = self.traceback is not None and _TIMED_OUT.search(self.traceback.message)
        return bool(found) and self._is_of_communication

    @property
    def _is_of_communication(self) -> bool:
        trace = self.traceback
        if trace is None:
            return False
        if _COMMUNICATION_ERROR.match(trace.message):
            return True
        innermost = trace.frames[-1].file if trace.frames else ""
        return is_in_this_package(innermost) or _COMMUNICATION.search(innermost) is not None

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + the signal; 1 if the rank raised before the launcher's signal."""
        if self.was_leaving:
            return 1
        return self.returncode if self.returncode >= 0 else 128 - self.returncode


@final
@dataclass(frozen=True)
class ScriptEnd:
    """The end of a rank's script without an exception, known from the rank's record or its exit code 0.

    Attributes:
        seconds: after the start.
        place: the last line of the script that ran; empty if unknown.
        pid: 0 if unknown.
    """

    rank: int
    seconds: float
    place: str = ""
    pid: int = 0


def is_lost_connection(message: str) -> bool:
    """Return whether this error message reports that another process went away."""
    return _LOST_PEER.search(message) is not None


def is_about_another_rank(message: str) -> bool:
    """Return whether this error message reports that another process went away or didn't come in time."""
    return is_lost_connection(message) or _TIMED_OUT.search(message) is not None


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that caused the others: the earliest, except lost connections and ranks we stopped.

    A rank that saved because it was preempted is the cause only if all others saved too or were stopped.
    """
    if not failures:
        return None
    return min(
        failures,
        key=lambda failure: (
            failure.stopped and failure.traceback is None and not failure.is_preempted,
            failure.is_preempted and any(not one.is_preempted and not one.stopped for one in failures),
            failure.is_consequence,
            failure.seconds,
            failure.rank,
        ),
    )


def left_early(failures: Sequence[Failure], ended: Sequence[ScriptEnd]) -> ScriptEnd | None:
    """Return the rank that ended without error while the first failing rank waited for it; None if there is none."""
    first = first_cause(failures)
    if first is None or not first.is_lost_peer:
        return None
    failed = {failure.rank for failure in failures if not failure.stopped}
    found = [end for end in ended if end.rank not in failed and end.seconds <= first.seconds + _NOTICED_SECONDS]
    return min(found, key=lambda end: (end.seconds, end.rank), default=None)


def still_running(failures: Sequence[Failure]) -> list[Failure]:
    """Return the ranks stopped by the launcher, if the first failing rank timed out waiting for others."""
    first = first_cause(failures)
    if first is None or not first.is_timeout:
        return []
    return sorted((one for one in failures if one.stopped and one.traceback is None), key=lambda one: one.rank)


def ended_preempted(failures: Sequence[Failure]) -> str:
    """Return one sentence about the ranks that saved after a preemption notice; empty if none did."""
    saved = sorted(failure.rank for failure in failures if failure.is_preempted)
    if not saved:
        return ""
    code = next(failure.returncode for failure in failures if failure.is_preempted)
    others = sorted(failure.rank for failure in failures if not failure.is_preempted)
    rest = f"; {some_ranks(others)} ended otherwise" if others else ""
    return (
        f"preempted: {some_ranks(saved)} saved, and ended with exit code {code}{rest}. Started again, the "
        "script resumes where it calls `accelerator.resume()`."
    )


def shorten(line: str, width: int = _LINE_WIDTH) -> str:
    """Return ``line``, cut to ``width`` characters."""
    return line if len(line) <= width else line[: width - 3] + "..."


def _how(failure: Failure, num_ranks: int = 1) -> str:
    if failure.was_leaving:
        return "raised"
    if failure.returncode < 0:
        verb = "stopped by the launcher with" if failure.stopped else "killed by"
        return f"{by_number(num_ranks, 'was', 'were')} {verb} {signal_name(-failure.returncode)}"
    return f"{'raised and ' if failure.traceback else ''}exited with code {failure.returncode}"


def how_it_ended(failure: Failure) -> str:
    """Describe in one line how a rank ended, including the kernel's information about its memory."""
    parts = [f"the process {_how(failure)}"]
    if failure.traceback is not None:
        parts.append(failure.traceback.exception)
    return ". ".join([*parts, failure.memory] if failure.memory else parts)


def _where(failure: Failure) -> list[str]:
    """Return the source lines or the last output lines of a failure."""
    if failure.traceback is None:
        return [f"  {line}" for line in failure.last_lines[-4:]]
    lines: list[str] = []
    for frame in failure.traceback.shown_frames:
        function = f", in {frame.function}" if frame.function else ""
        lines.append(f"  {frame.file}:{frame.line}{function}")
        if frame.source:
            lines.append(f"    {frame.source}")
    return lines + failure.traceback.message.splitlines()[:_SHOWN_MESSAGE_LINES]


def _others(failures: Sequence[Failure], first: Failure) -> list[str]:
    """Return one line for each way in which the other ranks ended."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        if failure is not first:
            groups.setdefault(_how_too(failure, 1), []).append(failure)
    ordered = sorted(groups.values(), key=lambda group: group[0].rank)
    return [
        shorten(f"{some_ranks(one.rank for one in group).capitalize()} {_how_too(group[0], len(group))}")
        for group in ordered[:2]
    ]


def _how_too(failure: Failure, num_ranks: int) -> str:
    """Describe how ranks ended like ``failure``, after another rank had failed."""
    if failure.traceback is not None:
        return f"then failed: {failure.traceback.exception}"
    how = _how(failure, num_ranks)
    return how if failure.stopped else f"then {how}"


def _first_to_fail(first: Failure, num_processes: int) -> str:
    head = (
        f"First cause: rank {first.rank} of {num_processes} (host {first.host}, pid {first.pid}) {_how(first)} "
        f"after {first.seconds:.1f} s."
    )
    return f"{head} Its peak memory was {first.peak_memory_mib:.0f} MiB." if first.peak_memory_mib else head


def _waited_in(waiting: Failure) -> str:
    trace = waiting.traceback
    if trace is not None and (found := _OWN_COLLECTIVE.search(trace.message)):
        return f"in {found['collective']}"
    if trace is not None and trace.shown_frames:
        frame = trace.shown_frames[0]
        return f"at {os.path.basename(frame.file)}:{frame.line}"
    return "waiting for it"


def _never_came(hung: Sequence[Failure], waiting: Failure, num_processes: int) -> list[str]:
    """Return the lines about still running ranks, for which ``waiting`` waited too long."""
    who = some_ranks([one.rank for one in hung])
    pids = f"{by_number(hung, 'pid', 'pids')} {', '.join(str(one.pid) for one in hung[:8])}"
    return [
        f"First cause: {who} of {num_processes} (host {hung[0].host}, {pids}) still ran after {waiting.seconds:.1f} s, "
        f"and didn't come to the call for which rank {waiting.rank} waited until its timeout, {_waited_in(waiting)}.",
        f"Rank {waiting.rank} then failed:",
    ]


def _first_to_leave(end: ScriptEnd, waiting: Failure, num_processes: int) -> list[str]:
    """Return the lines about a rank that ended without error while ``waiting`` waited for it."""
    pid = f", pid {end.pid}" if end.pid else ""
    at = f" at {end.place}" if end.place else " with code 0"
    return [
        f"First cause: rank {end.rank} of {num_processes} (host {waiting.host}{pid}) left the script{at} after "
        f"{end.seconds:.1f} s, while rank {waiting.rank} was {_waited_in(waiting)}.",
        f"Rank {waiting.rank} then failed, because all ranks have to make the same calls:",
    ]


def report(
    failures: Sequence[Failure], num_processes: int, *, hint: str = LOGS_HINT, ended: Sequence[ScriptEnd] = ()
) -> str:
    """Format at most 16 lines: the first names the rank at fault, the last is a hint.

    Args:
        ended: ranks that reached the end of their script; one that others waited for is the cause.
    """
    first = first_cause(failures)
    if first is None:
        return ""
    if (end := left_early(failures, ended)) is not None:
        heads = _first_to_leave(end, first, num_processes)
    elif hung := still_running(failures):
        heads = _never_came(hung, first, num_processes)
    else:
        heads = [_first_to_fail(first, num_processes)]
    lines = [*heads, *_where(first)]
    if first.memory:
        lines.append(first.memory)
    lines += _others(failures, first)
    if first.log is not None:
        lines.append(f"The whole output of rank {first.rank}: {first.log}")
    elif hint:
        lines.append(hint.format(rank=first.rank))
    return "\n".join(lines)


def _counter(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        return None
    return None


def _own_groups() -> dict[str, str]:
    """Return the control groups of this process: controller list -> path ("" is the unified hierarchy)."""
    groups: dict[str, str] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups[parts[1]] = parts[2]
    return groups


@final
@dataclass
class MemoryWatch:
    """The kernel's counts of out-of-memory kills at construction, for comparison with later counts."""

    root: Path = Path("/sys/fs/cgroup")
    machine: Path = Path("/proc/vmstat")
    groups: dict[str, str] = field(default_factory=_own_groups)
    before: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self._counts()

    def _files(self) -> dict[str, Path]:
        unified, memory = self.groups.get("", "/").lstrip("/"), self.groups.get("memory", "/").lstrip("/")
        return {
            "this control group": self.root / unified / "memory.events",
            "the container": self.root / "memory.events",
            "this memory group": self.root / "memory" / memory / "memory.oom_control",
            "this machine": self.machine,
        }

    def _counts(self) -> dict[str, int]:
        counted = {name: _counter(path, "oom_kill") for name, path in self._files().items()}
        return {name: count for name, count in counted.items() if count is not None}

    def limit_mib(self) -> float | None:
        """Return the memory limit of this process's control group in MiB, or None."""
        unified, memory = self.groups.get("", "/").lstrip("/"), self.groups.get("memory", "/").lstrip("/")
        for path in (self.root / unified / "memory.max", self.root / "memory" / memory / "memory.limit_in_bytes"):
            try:
                limit = int(path.read_text())
            except (OSError, ValueError):  # no such file, or the word "max"
                continue
            if limit < 2**60:  # the old hierarchy writes "no limit" as a huge number
                return limit / 2**20
        return None

    def evidence(self, pid: int | None = None) -> str:
        """Return one sentence that says whether the kernel killed processes for memory since construction.

        For a killed process ``pid`` it is the kernel's own line, if this process may read the kernel's log.
        """
        if pid is not None and (line := _kernel_line(pid)):
            return f"Out of memory: {line}"
        limit = self.limit_mib()
        bound = f" The memory limit is {limit:.0f} MiB." if limit is not None else ""
        now = self._counts()
        for name, count in now.items():
            kills = count - self.before.get(name, count)
            if kills > 0:
                return f"Out of memory: the kernel killed {kills} process(es) in {name} during this run.{bound}"
        if not now:
            return f"The kernel's count of out-of-memory kills can't be read here.{bound}"
        return f"The kernel counted no out-of-memory kill during this run, so a process sent SIGKILL.{bound}"


_KERNEL_LOG = "/dev/kmsg"


def _kernel_line(pid: int) -> str:
    """Return the kernel's newest log line about killing the process; empty without one."""
    found = ""
    try:
        log = os.open(_KERNEL_LOG, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:  # not on this system, or not for this user
        return found
    try:
        while True:
            try:
                record = os.read(log, 8192).decode(errors="replace")
            except BrokenPipeError:  # overwritten while it was read
                continue
            if f"Killed process {pid} " in record:
                found = record.partition(";")[2].partition("\n")[0].removeprefix("Out of memory: ")
            elif not record:
                return found
    except OSError:  # the end
        return found
    finally:
        os.close(log)


def record_saved(
    folder: str | None, rank: int, exit_code: int = PREEMPTED_EXIT_CODE, attempt: str | None = None
) -> None:
    """Record for the launcher of this folder, if any, that all ranks end preempted, with this exit code.

    Args:
        attempt: identifies this start among those of the same launcher: the error file that torch's agent set.
    """
    if folder is not None and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            saved_mark(Path(folder), rank).write_text(f"{exit_code} {attempt or ''}".strip())


def forget_saved(folder: str | None, rank: int) -> None:
    """Remove this rank's mark of an earlier attempt under the same launcher."""
    if folder is not None:
        with contextlib.suppress(OSError):
            saved_mark(Path(folder), rank).unlink()


def saved_exit_code(mark: Path, attempt: str = "") -> int | None:
    """Return the exit code in a rank's mark; None if there is no mark.

    With ``attempt``, also return None for the mark of another attempt.
    """
    try:
        code, _, saved_by = mark.read_text().partition(" ")
        return None if attempt and attempt != saved_by else int(code or PREEMPTED_EXIT_CODE)
    except (OSError, ValueError):
        return None


def record_end(folder: str | None, rank: int, place: str) -> None:
    """Record for the launcher of this folder, if any, where and when this rank's script ended."""
    if folder is not None and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            text = json.dumps({"time": time.time(), "place": place, "pid": os.getpid()})
            _end_mark(Path(folder), rank).write_text(text, encoding="utf-8")


def forget_end(folder: str | None, rank: int) -> None:
    """Remove this rank's end record of an earlier attempt under the same launcher."""
    if folder is not None:
        with contextlib.suppress(OSError):
            _end_mark(Path(folder), rank).unlink()


def recorded_ends(folder: Path, started: float) -> list[ScriptEnd]:
    """Read the ranks' records of where their scripts ended; ``started`` is when the run began."""
    found: list[ScriptEnd] = []
    for mark in folder.glob("end_*"):
        with contextlib.suppress(OSError, ValueError):
            noted = json.loads(mark.read_text(encoding="utf-8"))
            rank = int(mark.name.rpartition("_")[2])
            found.append(ScriptEnd(rank, max(0.0, noted["time"] - started), noted["place"], noted["pid"]))
    return found


def _end_mark(folder: Path, rank: int) -> Path:
    return folder / f"end_{rank}"


def note_logs(folder: Path, logs: Path) -> None:
    """Write the path of a launcher's log folder into its records folder, for its ranks."""
    (folder / _LOGS).write_text(str(logs.resolve()), encoding="utf-8")


def logs_of_launcher(folder: str | None) -> str | None:
    """Return the log folder of the launcher with this records folder, if it has both."""
    try:
        return None if folder is None else (Path(folder) / _LOGS).read_text(encoding="utf-8")
    except OSError:
        return None


def saved_mark(folder: Path, rank: int) -> Path:
    """Return the file that marks a rank as saved because of a preemption."""
    return folder / f"saved_{rank}"


#: Environment variable: the file in which torch's agent expects a rank's exception; a new one in each attempt.
AGENTS_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ERROR_FILES = ("ACCELERATE_ERROR_FILE", AGENTS_ERROR_FILE)


def record_uncaught(read: Callable[[str], str | None]) -> None:
    """Install a hook that writes an uncaught exception to the launcher's error file.

    ``read`` reads environment variables. Without such a file in them, install nothing. The file has the format that
    torch's elastic agent reads.
    """
    found = [path for name in _ERROR_FILES if (path := read(name))]
    if not found or getattr(sys.excepthook, "records_failures", False):
        return
    before = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        write_error_file(Path(found[0]), error)
        before(kind, error, trace)

    record.records_failures = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.excepthook = record


def write_error_file(path: Path, error: BaseException) -> None:
    """Write the exception, its traceback and its time to a file, atomically; keep an existing file.

    The launcher may end this process at any moment, and torch's agent crashes on an incomplete file.
    """
    now = time.time()
    details = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(now)),
            "seconds": now,
        },
    }
    with contextlib.suppress(OSError):  # a full disk must not hide the exception itself
        if not path.exists():
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            beside.write_text(json.dumps({"message": details}), encoding="utf-8")
            beside.replace(path)
