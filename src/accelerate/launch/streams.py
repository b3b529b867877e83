"""One output of one rank on its way to the terminal: shown as it comes, kept in a file, remembered by its
end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, final

from ..health.failure import TRACEBACK_START

_TAIL_BYTES: Final = 64 * 1024
_START: Final = TRACEBACK_START.encode()


def write_all(descriptor: int, data: bytes) -> None:
    """All of ``data`` is written, or the reader has gone."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, BlockingIOError):  # nobody reads any more, or can't take it: the run goes on
        return


@final
class OutputStream:
    """The read end of a rank's output and what becomes of the bytes."""

    def __init__(
        self, descriptor: int, show: Callable[[bytes], None], *, prefix: str = "", log: Path | None = None
    ) -> None:
        self.descriptor = descriptor
        self._show = show
        self._prefix = prefix.encode()
        self._line = b""
        self._tail = bytearray()
        self._log: BinaryIO | None = None
        #: When the last traceback began to arrive (``time.monotonic``), the best date of a failure that there
        #: is.
        self.traceback_at: float | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("wb", buffering=0)

    def read(self) -> bool:
        """Whether the output may still bring something, after all that is there now has been dealt with."""
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose other side is closed says EIO instead of an empty read
            data = b""
        if data:
            self._take(data)
        return bool(data)

    def drain(self) -> None:
        """All that is there now has been dealt with; the descriptor doesn't block."""
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
        if self._log is not None:
            self._log.write(data)
        if not self._prefix:
            self._show(data)
            return
        *whole, self._line = (self._line + data).split(b"\n")
        if whole:
            self._show(b"".join(self._prefix + line + b"\n" for line in whole))

    def text(self) -> str:
        """The last 64 KiB."""
        return self._tail.decode("utf-8", errors="replace")

    def close(self) -> None:
        """Nothing is held any more; an unfinished line has been shown."""
        if self._line:
            self._show(self._prefix + self._line + b"\n")
            self._line = b""
        os.close(self.descriptor)
        if self._log is not None:
            self._log.close()
