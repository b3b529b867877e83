"""The end of a run's output: the last lines of the newest log file in its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from .document import Output

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
