"""The record of a run by one rank: a small file of JSON lines, written by a thread.

Each rank writes its own file ``{logging_dir}/monitor/rank_{n}.jsonl``, and ``accelerate monitor`` reads them all. A
restarted run appends to the files of the first one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import queue
import re
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from ...distributed.failures import RECORDS_VARIABLE
from ...settings.env import read

#: The folder of the files in the project, and their names.
FOLDER: Final = "monitor"
#: The folder of the run's files, whatever the script says; `accelerate launch --monitor` sets it.
FOLDER_VARIABLE: Final = "ACCELERATE_MONITOR"
FILE_PATTERN: Final = "rank_{}.jsonl"
#: Events after which a process writes no more.
ENDINGS: Final = ("end", "error", "stop", "preempted", "killed")
_KIND: Final = re.compile(r'"event": "(\w+)"')
_END_BYTES: Final = 65536
#: The last word of an option with a secret value: `--hf_token`, but not `--tokenizer` or `--max_tokens`.
_SECRET: Final = re.compile(
    r"(^|[-_.]|api|auth|access)(token|secrets?|password|passwd|passphrase|key|credentials?)$", re.IGNORECASE
)
#: The password of a URL: `scheme://user:password@host`.
_PASSWORD: Final = re.compile(r"(://[^/@:\s]*):[^/@\s]+@")
#: An option of a command line, but not a negative number.
_OPTION: Final = re.compile(r"--?[A-Za-z_]")
#: (process, file) of each record that has begun here.
_begun: Final[set[tuple[int, Path]]] = set()
_MAX_WARNINGS: Final = 200
_JOIN_SECONDS: Final = 2.0


@final
class RankRecord:
    """The record file of one rank, with numbers at most every ``seconds_between`` seconds, and all events.

    Args:
        folder: the folder of all ranks' files; None writes no file.
        seconds_between: the minimum time between two reports in the file; earlier ones are omitted.
        utilization: returns the utilization of the device; the writer thread calls it for each line of numbers.
    """

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        *,
        seconds_between: float = 0.1,
        utilization: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.path: Path | None = None if folder is None else folder / FILE_PATTERN.format(rank)
        self._seconds_between, self._utilization = seconds_between, utilization
        self._last = -math.inf
        self._left_out: Mapping[str, object] | None = None
        self._lines: queue.SimpleQueue[Mapping[str, object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._listener: _Listener | None = None

    def start(self, **facts: object) -> None:
        """Start the writer thread, write that a process has started, and record warnings from now on."""
        if self.path is None or self._thread is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write, name="accelerate_record", daemon=True)
        self._thread.start()
        self._listener = _Listener(self)
        logging.getLogger().addHandler(self._listener)
        atexit.register(_end, weakref.ref(self))
        key = (os.getpid(), self.path.absolute())
        if key not in _begun and (lost := _unfinished(self.path)) is not None:
            self.event("killed", text=lost)  # the writer has terminated the last line if it was torn
        _begun.add(key)
        self.event("start", pid=os.getpid(), **facts)
        _tell_launcher(self.path)

    def numbers(self, values: Mapping[str, object]) -> None:
        """Write ``values`` as one line of the file, unless the last such line is very recent."""
        now = time.monotonic()
        if now - self._last < self._seconds_between:
            self._left_out = values
        elif self._thread is not None:
            self._last, self._left_out = now, None
            self._put(values)

    def event(self, kind: str, **facts: object) -> None:
        """Write an event with its facts."""
        if self._thread is None:
            return
        if self._left_out is not None:  # write the newest numbers before the event that follows them
            self._put(self._left_out)
            self._left_out = None
        self._put({"event": kind, **facts})

    def finish(self, kind: str = "end", **facts: object) -> None:
        """Write a final event, and close the file."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():  # a forked worker has this object, but not its thread
            return
        self.event(kind, **facts)
        self._thread = None
        if self._listener is not None:
            logging.getLogger().removeHandler(self._listener)
        self._lines.put(None)
        thread.join(_JOIN_SECONDS)

    def _put(self, values: Mapping[str, object]) -> None:
        if self._pid == os.getpid():
            self._lines.put({"time": round(time.time(), 3), **values})

    def _write(self) -> None:
        assert self.path is not None
        try:
            is_torn = _is_torn(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * is_torn)
                while (line := self._lines.get()) is not None:
                    if "event" not in line and (busy := self._utilization()) is not None:
                        line = {"device_utilization": busy, **line}
                    file.write(json.dumps(line, default=str) + "\n")
                    if self._lines.empty():
                        file.flush()
        except OSError as error:
            print(f"accelerate: {self.path} can't be written ({error}); training continues.", file=sys.stderr)


def shown_command(argv: Sequence[str]) -> str:
    """Return the command line as typed, without arguments that look like passwords or keys."""
    shown: list[str] = []
    for word in argv:
        name, sign, _ = word.partition("=")
        follows_secret = (
            bool(shown) and shown[-1].startswith("-") and _SECRET.search(shown[-1]) and "=" not in shown[-1]
        )
        if follows_secret and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if sign and _SECRET.search(name) else word)
    return _PASSWORD.sub(r"\1:***@", shlex.join(shown))


def arguments_of(command: str) -> dict[str, object]:
    """Return the options of a shown command line by name, and the other arguments by position."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # a masked password took a quotation mark with it
        return {}
    found: dict[str, object] = {}
    option, position = "", 0  # the option whose value may follow; the number of arguments without one
    for word in words:
        name, sign, value = word.partition("=")
        is_option = _OPTION.match(word) is not None
        if is_option or (sign and name.replace(".", "_").isidentifier()):  # --lr=1, or lr=1 as Hydra has it
            option = name.lstrip("-").replace("-", "_")
            found[option] = _number_or_text(value) if sign else True
            option = "" if sign else option
        else:
            position += not option
            found[option or f"argument {position}"] = _number_or_text(word)
            option = ""
    return found


def _number_or_text(text: str) -> object:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _is_torn(path: Path) -> bool:
    """Return whether the file's last line is incomplete because its process died during the write."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file, or an empty one
        return False


def _unfinished(path: Path) -> str | None:
    """Return a note about the file's previous process if it hasn't recorded its end; else None."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # the first one
        return None
    has_ended = not lines
    for kind in (found[1] for line in lines if (found := _KIND.search(line))):
        has_ended = kind in ENDINGS or (has_ended and kind != "start")
    if has_ended:
        return None
    return "the process before ended without a word: it was killed, or its machine was lost"


def _tell_launcher(path: Path) -> None:
    """Tell the launcher, if any, this process's file, to record a sudden end in it."""
    folder = read(RECORDS_VARIABLE)
    if folder is not None and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            (Path(folder) / str(os.getpid())).write_text(str(path.resolve()), encoding="utf-8")


@final
class _Listener(logging.Handler):
    """A logging handler that records warnings and errors of this process's loggers as events."""

    def __init__(self, record: RankRecord) -> None:
        super().__init__(logging.WARNING)
        self._record = weakref.ref(record)
        self._left = _MAX_WARNINGS

    def emit(self, record: logging.LogRecord) -> None:
        """Record the log line as an event of the run, up to a limit."""
        target = self._record()
        if target is not None and self._left > 0:
            self._left -= 1
            target.event("warning", text=record.getMessage()[:500], logger=record.name)


def _end(reference: weakref.ref[RankRecord]) -> None:
    """Finish the record at the interpreter's exit, with the final error if any, unless it is already finished."""
    record = reference()
    if record is None:
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        record.finish()
    else:
        record.finish("error", text=f"{type(error).__name__}: {error}"[:500])
