"""How far a long save or load has come: one line on the terminal of the main process, gone when it is done."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, TextIO, final

#: What is done sooner is not shown at all.
QUIET_SECONDS: Final = 1.0
_REDRAW_SECONDS: Final = 0.2
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def as_text(num_bytes: float) -> str:
    """``1234567`` as ``1.2 MB``."""
    size, unit = float(num_bytes), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


@final
class Meter:
    """Bytes done of bytes to do; silent where the output is no terminal, or ``shown`` is False."""

    def __init__(self, what: str, num_bytes: int, *, shown: bool = True, output: TextIO | None = None) -> None:
        self._what = what
        self._total = num_bytes
        self._output = output or sys.stderr
        self._is_shown = shown and self._output.isatty()
        self._done = 0
        self._width = 0
        self._start = time.monotonic()
        self._next_draw = self._start + QUIET_SECONDS
        self._lock = threading.Lock()  # files are read by several threads

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done."""
        if not self._is_shown:
            return
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now >= self._next_draw:
                self._next_draw = now + _REDRAW_SECONDS
                self._draw(now - self._start)

    def _draw(self, seconds: float) -> None:
        total = max(self._total, self._done)
        share = f"{100 * self._done // total}%" if total else ""
        rate = as_text(self._done / seconds)
        line = f"{self._what}: {share} {as_text(self._done)} of {as_text(total)}, {rate}/s"
        self._output.write("\r" + line.ljust(self._width))
        self._output.flush()
        self._width = len(line)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._output.write("\r" + " " * self._width + "\r")
            self._output.flush()


SILENT: Final = Meter("", 0, shown=False)
