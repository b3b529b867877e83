"""The outputs of ranks: shown as they arrive, written to log files, with their end kept for the failure report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, final

from ..distributed.failures import TRACEBACK_START
from ..errors import LaunchError

_TAIL_BYTES: Final = 64 * 1024
#: An unfinished line is shown after this long. Programs without buffers write lines in pieces, and pieces of two ranks
#: would mix.
HOLD_SECONDS: Final = 0.2
_START: Final = TRACEBACK_START.encode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, or stop where the reader has gone or can't take it."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, BlockingIOError):  # the reader has gone or can't take it: the run goes on
        return


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` to the unbuffered file; OSError passes through."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def open_standard_descriptors() -> None:
    """Open standard input, output and error on the null device where this process was started without them.

    Otherwise the next pipe or socket would have its number, and a child would take it for its output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@final
class OutputStream:
    """The read end of one output of a rank: shows, logs and keeps the last of the data."""

    def __init__(
        self,
        descriptor: int,
        show: Callable[[bytes], None],
        *,
        prefix: str = "",
        log: Path | None = None,
        appends: bool = False,
    ) -> None:
        self.descriptor = descriptor
        self._show = show
        self._prefix = prefix.encode()
        self._line = b""
        self._held_since = 0.0
        self._tail = bytearray()
        self._log: BinaryIO | None = None
        #: When the last traceback began to arrive (``time.monotonic``), the best estimate of when the rank failed.
        self.traceback_at: float | None = None
        if log is not None:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                self._log = log.open("ab" if appends else "wb", buffering=0)
            except OSError as error:
                raise LaunchError(f"--log_dir: {log} can't be written: {error.strerror}.") from error

    def read(self) -> bool:
        """Read and process what has arrived, and return whether more may come."""
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose other side is closed gives EIO instead of an empty read
            data = b""
        if data:
            self._take(data)
        return bool(data)

    def drain(self) -> None:
        """Read and process everything that has arrived; the descriptor doesn't block."""
        while True:
            try:
                data = os.read(self.descriptor, 65536)
            except OSError:
                return
            if not data:
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        if _START in self._tail[-len(_START) :] + data:
            self.traceback_at = time.monotonic()
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        self._write_log(data)
        if not self._line:
            self._held_since = time.monotonic()
        text = self._line + data
        if not self._prefix:
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._line = text[end:]
            if end:
                self._show(text[:end])
            return
        *whole, self._line = text.split(b"\n")
        if whole:
            self._show(b"".join(self._prefix + line + b"\n" for line in whole))

    def _write_log(self, data: bytes) -> None:
        """Append the data to the log; after an error say so once and go on without the log."""
        if self._log is None:
            return
        try:
            write_whole(self._log, data)
        except OSError as error:
            note = f"accelerate launch: {self._log.name} ends here: {error.strerror}. The run continues without it.\n"
            self._show(note.encode())
            self._log.close()
            self._log = None

    @property
    def holds(self) -> bool:
        """Whether the start of a line waits to be shown by :meth:`release`."""
        return bool(self._line) and not self._prefix

    def release(self) -> None:
        """Show an unfinished line that has waited long enough: a prompt, a progress bar."""
        if self.holds and time.monotonic() - self._held_since >= HOLD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Show everything that is held; behind a prefix, end an unfinished line."""
        if self._line:
            self._show(self._prefix + self._line + b"\n" if self._prefix else self._line)
            self._line = b""

    @property
    def is_inside_line(self) -> bool:
        """Whether text shown next would continue an unfinished line."""
        return bool(self._tail) and not self._prefix and not self._tail.endswith(b"\n")

    def text(self) -> str:
        """Return the last 64 KiB as text."""
        return self._tail.decode("utf-8", errors="replace")

    def close(self) -> None:
        """Show what is held and close the descriptor and the log."""
        self.flush()
        os.close(self.descriptor)
        if self._log is not None:
            self._log.close()
