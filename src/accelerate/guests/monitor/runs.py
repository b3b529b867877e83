"""The runs in a folder: the folder itself, or those below it, listed with their states."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

from .document import Facts, RunList, RunSummary
from .reading import RunFiles, note_of
from .records import FILE_PATTERN, FOLDER
from .snapshot import as_shown, json_value, settings, state_of, why_ended

_FIRST: Final = FILE_PATTERN.format(0)
#: The depth below the folder to search for runs, and the maximum number of runs to show.
_DEPTH: Final = 4
_MAX_RUNS: Final = 200
_SEARCH_SECONDS: Final = 5.0
#: Settings that the list has in another form: the arguments, the number of ranks, the name, tags and note.
_LISTED: Final = ("command", "ranks", "run_name", "tags", "notes")


@final
class Runs:
    """The runs of ``folder``, which may be or become a run itself, or contain several.

    Args:
        may_come: the folder need not exist yet.

    Raises:
        SettingError: ``folder`` isn't a folder.
    """

    def __init__(self, folder: Path, *, may_come: bool = False) -> None:
        self.only = RunFiles(folder, may_come=may_come)
        self.folder: Path = self.only.folder
        self._runs: dict[str, RunFiles] = {}
        self._num_found = 0
        self._lies_deep = False
        self._next_search = 0.0

    @property
    def is_one(self) -> bool:
        """Whether the folder is one run, or may become one: it has the files of at most one run."""
        self._search()
        return self._num_found <= 1

    def find(self, name: str) -> RunFiles | None:
        """Return the run of this name, or None; a single run has the empty name."""
        if name or not self.is_one:
            return self._runs.get(name)
        return next(iter(self._runs.values()), self.only) if self._lies_deep else self.only

    def listed(self, *, now: float | None = None) -> RunList:
        """Return the runs with their current content, newest first."""
        now = time.time() if now is None else now
        is_one = self.is_one
        runs = [] if is_one else [_summary(name, run, now) for name, run in self._runs.items()]
        runs.sort(key=lambda run: (run["state"] == "running", run["seen"]), reverse=True)
        differing = _differing([run["settings"] for run in runs])
        for run in runs:
            run["settings"] = {name: run["settings"][name] for name in differing if name in run["settings"]}
        return {"folder": as_shown(self.folder), "is_one": is_one, "num_found": self._num_found, "runs": runs}

    def _search(self) -> None:
        if time.monotonic() < self._next_search:
            return
        self._next_search = time.monotonic() + _SEARCH_SECONDS
        found = sorted(_folders(self.folder, _DEPTH), reverse=True)
        self._num_found = len(found)
        self._lies_deep = any(path.parent != self.folder != path for _, path in found)
        paths = [path for _, path in found[:_MAX_RUNS]]
        names = [path.name if path == self.folder else path.relative_to(self.folder).as_posix() for path in paths]
        self._runs = {name: self._runs.get(name) or RunFiles(path) for name, path in zip(names, paths, strict=True)}


def _folders(folder: Path, depth: int) -> Iterator[tuple[float, Path]]:
    """Yield the last write time of rank 0 and the folder of each run; folders below a run belong to it."""
    for own in (folder / FOLDER / _FIRST, folder / _FIRST):
        try:
            yield own.stat().st_mtime, folder
        except OSError:  # there is none
            continue
        return
    if depth == 0:
        return
    try:
        below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:  # not ours to read, or gone
        return
    for path in below:
        yield from _folders(Path(path), depth - 1)


def _differing(settings: Sequence[Facts]) -> list[str]:
    """Return the names of the settings that aren't the same in all runs."""
    names = dict.fromkeys(name for each in settings for name in each if name not in _LISTED)
    return [name for name in names if len({str(each.get(name)) for each in settings}) > 1]


def _summary(name: str, run: RunFiles, now: float) -> RunSummary:
    run.refresh()
    main, note = run.main, note_of(run)
    curves = {**run.logged, **main.curves}
    return {
        **note,
        "run": name,
        "name": note["name"] or name,
        "state": state_of(run, now),
        "why": why_ended(run),
        "began": main.first_time,
        "seen": run.last_time,
        "step": main.newest.get("step"),
        "num_ranks": len(run.ranks),
        "settings": settings(run),
        "numbers": {name: json_value(curve.values[-1]) for name, curve in curves.items() if curve.values},
    }
