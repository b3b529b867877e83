"""The ledger of a run: how each of its processes spent its time, for ``accelerate report``.

Rank 0 writes one small file for each start of the run, ``{logging_dir}/monitor/ledger/{time}_{pid}.jsonl``. Once a
second, a thread overwrites one of the last two lines with the account of the process. So the file stays small, and a
process that is killed at any time, even during a write, loses at most two seconds. Lines before a save or a load are
kept.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple, final

#: The folder of the ledgers, inside that of the records.
FOLDER: Final = "ledger"
#: The kinds of time. A process is in one of the first four at any time; the others are parts of their time.
START_UP: Final = "start_up"
STEP: Final = "step"
EVALUATION: Final = "evaluation"
SHUTDOWN: Final = "shutdown"
DATA_WAIT: Final = "data_wait"
SAVE: Final = "save"
COMPILE: Final = "compile"
HANG: Final = "hang"
#: The end of a loop that another loop in the same process followed.
NEXT: Final = "next"
_SECONDS: Final = 1.0
_LINE_BYTES: Final = 512
_IMPORTED: Final = perf_counter()


class Position(NamedTuple):
    """The position of a loop, for its ledger; the numbers of seconds never decrease.

    Attributes:
        updates: the number of updates, including those before a resumed checkpoint.
        first_update: the number of updates at the start of the loop, or at its last load.
        loads: the number of checkpoints that the loop has loaded.
        waited: the seconds that the loop has waited for batches.
        evaluated: the seconds of passes over other loaders inside the training pass.
        compiled: the seconds of compilation by torch.
        progress: a value that changes with every batch.
        stalled: the seconds without progress; None if only ``progress`` tells.
    """

    updates: int
    first_update: int
    loads: int
    waited: float
    evaluated: float
    compiled: float
    progress: Hashable
    stalled: float | None


@final
@dataclass
class Account:
    """The seconds of one process by kind; their sum is always its age.

    Attributes:
        phase: the current phase of the process.
        since: the start of that phase, or the last time from which seconds were moved.
    """

    since: float
    phase: str = START_UP
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def enter(self, phase: str, at: float) -> None:
        """Start ``phase`` at the time ``at``."""
        at = max(at, self.since)
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + at - self.since
        self.phase, self.since = phase, at

    def move(self, kind: str, seconds: float, phase: str | None = None) -> None:
        """Count ``seconds`` of the running phase, or of ``phase``, as ``kind``."""
        phase = phase or self.phase
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def at(self, now: float) -> Account:
        """Return a copy that ends now."""
        copy = Account(self.since, self.phase, dict(self.seconds))
        copy.enter(self.phase, now)
        return copy

    def settle(self) -> None:
        """Remove time counted twice, so that no kind is negative."""
        short = -self.seconds.get(STEP, 0.0)
        for part in (HANG, COMPILE, EVALUATION, DATA_WAIT):
            if short > 0:
                taken = min(short, max(0.0, self.seconds.get(part, 0.0)))
                self.move(STEP, taken, part)
                short -= taken


@final
class Ledger:
    """The file of one process's account, and the thread that writes it.

    Args:
        folder: the folder of the records; None writes no ledger.
        position: a method that returns the loop's position, called by the thread; its object isn't kept alive.
        hang_seconds: the seconds without progress that count as a hang.
    """

    def __init__(self, folder: Path | None, position: Callable[[], Position], hang_seconds: float) -> None:
        if folder is not None:
            _Newest.begin(self)
        now = perf_counter()
        age = now - max(now - process_age(), _Newest.until)
        self._began = round(time.time() - age, 3)
        self._account = Account(now - age)
        self._begin = now - age
        self._position, self._hang_seconds = weakref.WeakMethod(position), hang_seconds
        self._before = self._newest = position()
        self._progress: tuple[Hashable, float] = (None, now)
        self._hang_began: tuple[float, float] | None = None  # seconds of the hang so far, and of waiting before it
        self._ended: str | None = None
        self._pid, self._offset, self._turn = os.getpid(), 0, 0
        self._lock, self._file_lock, self._left = threading.Lock(), threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        if folder is not None:
            self._path = folder / FOLDER / f"{self._began:.3f}_{self._pid}.jsonl"
            self._thread = threading.Thread(target=self._keep, name="accelerate_ledger", daemon=True)
            self._thread.start()
            atexit.register(_end, weakref.ref(self))

    def enter(self, phase: str, at: float) -> None:
        """Start ``phase`` at the time ``at``."""
        with self._lock:
            self._account.enter(phase, at)

    def rejoin(self, at: float | None, began: float) -> None:
        """Count the time between the last step ``at`` of one pass and the beginning of another as evaluation."""
        with self._lock:
            if at is None or self._account.phase != STEP:
                self._account.enter(STEP, began)
            elif began > at:
                self._account.move(EVALUATION, began - at)

    def saved(self, seconds: float) -> None:
        """Count ``seconds`` of the running phase as a save, and keep a line of this instant."""
        with self._lock:
            self._account.move(SAVE, seconds)
        self.keep()

    def keep(self) -> None:
        """Write the current account to a line that is never overwritten."""
        if self.is_alive:
            self._write(stays=True)

    def finish(self, how: str) -> None:
        """Record how the loop ended; the time after it is the shutdown of the process."""
        with self._lock:
            if self._ended is None:
                self._ended = how
                self._account.enter(SHUTDOWN, perf_counter())
        if self.is_alive:
            self._write()

    def close(self) -> None:
        """Write the final account."""
        thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
            self._left.set()
            thread.join(_SECONDS)
            self._write()
            _Newest.until = perf_counter()

    @property
    def is_alive(self) -> bool:
        """Whether this process writes the file."""
        return self._thread is not None and self._pid == os.getpid()  # a forked worker doesn't have the thread

    # -- the thread ----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            self._write()
            if self._left.wait(_SECONDS):
                return

    def _write(self, *, stays: bool = False) -> None:
        # A hanging disk must not block the loop, which acquires `_lock` at the end of a pass.
        with self._file_lock:
            with self._lock:
                line = json.dumps(self._line(perf_counter()), separators=(",", ":")).encode()
            try:
                self._put(line.ljust(_LINE_BYTES - 1) + b"\n")
            except OSError as error:
                self._left.set()
                self._thread = None
                print(f"accelerate: {self._path} can't be written ({error}); training continues.", file=sys.stderr)
            if stays:
                self._offset, self._turn = self._offset + (self._turn + 1) * _LINE_BYTES, 0
            else:
                self._turn ^= 1

    def _put(self, line: bytes) -> None:
        assert self._path is not None
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        with self._path.open("r+b", buffering=0) as file:
            file.seek(self._offset + self._turn * _LINE_BYTES)
            file.write(line)

    def _line(self, now: float) -> dict[str, object]:
        """Return the current account as one line of the file."""
        before, ask = self._newest, self._position()
        position = self._newest = before if ask is None else ask()
        if position.compiled > before.compiled:
            self._account.move(COMPILE, position.compiled - before.compiled)
        account = self._account.at(now)
        account.move(DATA_WAIT, position.waited - self._before.waited, STEP)
        account.move(EVALUATION, position.evaluated - self._before.evaluated, STEP)
        self._count_hang(position, account, now)
        account.settle()
        return {
            "began": self._began,
            "elapsed": round(now - self._begin, 3),
            "pid": self._pid,
            "updates": position.updates,
            "first_update": position.first_update,
            "loads": position.loads,
            "phase": account.phase,
            "ended": self._ended,
            "seconds": {kind: round(seconds, 3) for kind, seconds in account.seconds.items() if seconds},
        }

    def _count_hang(self, position: Position, account: Account, now: float) -> None:
        """Count an unfinished hang in ``account`` only, and a finished one permanently."""
        if position.progress != self._progress[0] or account.phase != STEP:
            self._progress = (position.progress, now)
        stalled = now - self._progress[1] if position.stalled is None else position.stalled
        if stalled >= self._hang_seconds:
            waited = position.waited if self._hang_began is None else self._hang_began[1]
            self._hang_began = (stalled, waited)
            account.move(HANG, stalled)
        elif self._hang_began is not None:
            seconds, waited = self._hang_began
            self._hang_began = None
            for each in (account, self._account):
                each.move(HANG, max(0.0, seconds - (position.waited - waited)))


@final
class _Newest:
    """The newest ledger of this process."""

    ledger: weakref.ref[Ledger] | None = None
    until: float = -math.inf  # up to then, the process's time is in another ledger

    @classmethod
    def begin(cls, ledger: Ledger) -> None:
        before = None if cls.ledger is None else cls.ledger()
        if before is not None and before.is_alive:
            before.finish(NEXT)
            before.close()
        cls.ledger = weakref.ref(ledger)


def process_age() -> float:
    """Return the seconds since this process started; if unknown, since this file was imported."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        if age >= 0:  # a forked process is younger than this import
            return age
    return perf_counter() - _IMPORTED


def _end(reference: weakref.ref[Ledger]) -> None:
    """Close the ledger at the interpreter's exit, with how it ended."""
    ledger = reference()
    if ledger is not None and ledger.is_alive:
        ledger.finish("exit" if getattr(sys, "last_value", None) is None else "error")
        ledger.close()
