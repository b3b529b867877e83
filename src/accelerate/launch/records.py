"""The ends of ranks that couldn't record them, written by their launcher for ``accelerate monitor``.

A rank that keeps such a file says so in a folder of the launcher's, under its process id. One that saved because of a
preemption leaves a mark there, under its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from ..distributed.failures import (
    RECORDS_VARIABLE,
    Failure,
    ScriptEnd,
    how_it_ended,
    note_logs,
    recorded_ends,
    saved_exit_code,
    saved_mark,
)
from ..settings.option import TRUE_WORDS
from ..settings.preemption import PREEMPTED_EXIT_CODE

_ENDINGS: Final = ('"event": "error"', '"event": "stop"', '"event": "preempted"')
_END_BYTES: Final = 8192


@final
class EndRecords:
    """The launcher's folder, for one run; its ranks get :attr:`environment`."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which ranks find the folder."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="accelerate_records_"))
        return {RECORDS_VARIABLE: str(self._folder)}

    def note_logs(self, logs: Path | str | None) -> None:
        """Tell the ranks where the launcher's logs are, if they are anywhere: flight records go there too."""
        if logs:
            with contextlib.suppress(OSError):
                note_logs(Path(self.environment[RECORDS_VARIABLE]), Path(logs))

    def is_preempted(
        self, rank: int, returncode: int | None, environment: Mapping[str, str], attempt: str = ""
    ) -> bool:
        """Return whether the rank ended with the code of a saved run, and did save, or was asked to on signals.

        Any script may exit with this code for a reason of its own; one that has saved chooses the code.

        Args:
            attempt: the start that ended, where there are several: it may end before it removes the mark of another.
        """
        if not returncode:
            return False
        asked = environment.get("ACCELERATE_SAVE_ON_SIGNAL", "").strip().lower() in TRUE_WORDS
        if asked and returncode == PREEMPTED_EXIT_CODE:
            return True
        return self._folder is not None and saved_exit_code(saved_mark(self._folder, rank), attempt) == returncode

    @property
    def saved_exit_code(self) -> int | None:
        """The exit code of a rank of this host that saved because of a preemption, as all ranks then have.

        A mark of the attempt before counts until a rank joins the next one: nothing has been trained since.
        """
        marks = sorted(self._folder.glob("saved_*")) if self._folder is not None else []
        return next((code for mark in marks if (code := saved_exit_code(mark)) is not None), None)

    def script_ends(self, started: float, ended_well: Sequence[ScriptEnd]) -> list[ScriptEnd]:
        """Return the ranks whose scripts ended without an exception: as they noted it, else as ``ended_well`` says."""
        noted = [] if self._folder is None else recorded_ends(self._folder, started)
        known = {end.rank for end in noted}
        return [*noted, *(end for end in ended_well if end.rank not in known)]

    def write(self, failures: Sequence[Failure]) -> None:
        """Record how each of these ranks ended, unless it has recorded that itself."""
        folder = self._folder
        if folder is None:
            return
        for failure in failures:
            try:
                record = Path((folder / str(failure.pid)).read_text(encoding="utf-8"))
                with record.open("rb+") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                    last = file.read().decode(errors="replace")
                    text = last[last.rfind('"event": "start"') + 1 :]
                    if not any(ending in text for ending in _ENDINGS):
                        line = {"time": round(time.time(), 3), "event": "killed", "text": how_it_ended(failure)}
                        torn = b"" if last.endswith("\n") or not last else b"\n"
                        file.write(torn + json.dumps(line).encode() + b"\n")
            except OSError:  # it has no record, or not here
                continue

    def close(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
