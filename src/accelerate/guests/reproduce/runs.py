"""The entries of a record as runs, and the comparison of two of them.

A run is a launch that began from nothing, with the launches that resumed it. A point is an update with recorded
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ...checkpointing.manifest import Manifest, problems
from ...errors import CheckpointError
from ...names import MANIFEST_NAME
from .chain import Chain, Entry
from .sources import hash_of

#: Facts of a point, in the order in which a difference would arise.
FACTS: Final = {
    "order": "the order of the samples",
    "batch": "the samples of the batch",
    "weights": "the weights",
}

Points = dict[int, dict[str, Any]]


@final
@dataclass
class RecordedRun:
    """A run: its launches, its points and its checkpoints.

    Attributes:
        has_end: whether the last entry tells how the program ended.
        repeated: updates that two launches have computed with different results.
    """

    launches: list[Entry]
    has_end: bool = False
    points: Points = field(default_factory=dict[int, dict[str, Any]])
    checkpoints: list[Entry] = field(default_factory=list[Entry])
    repeated: list[int] = field(default_factory=list[int])

    @property
    def last(self) -> int:
        """The last update that was recorded."""
        return max(self.points)

    def add(self, entry: Entry) -> None:
        """Take an entry of one of the launches."""
        self.has_end = entry["kind"] in ("end", "failure")
        if entry["kind"] == "checkpoint":
            self.checkpoints.append(entry)
        if "weights" in entry:
            facts = {name: entry[name] for name in FACTS if name in entry}
            known = self.points.setdefault(entry["updates"], {})
            if any(known.get(name, value) != value for name, value in facts.items()):
                self.repeated.append(entry["updates"])
            known |= facts

    def launch_at(self, update: int) -> Entry:
        """Return the last launch that went on from ``update`` or before."""
        return [one for one in self.launches if one is self.launches[0] or one["updates"] <= update][-1]


def runs_of(entries: Iterable[Entry]) -> list[RecordedRun]:
    """Return the runs in the order in which they began."""
    runs: list[RecordedRun] = []
    by_launch: dict[str, RecordedRun] = {}
    for entry in entries:
        if entry["kind"] == "launch":
            before = [run for run in runs if run.launches[0]["number"] == entry["number"]]
            if entry["resumed"] is not None and before:
                before[-1].launches.append(entry)
                by_launch[entry["launch"]] = before[-1]
            else:
                runs.append(RecordedRun([entry]))
                by_launch[entry["launch"]] = runs[-1]
        if entry["launch"] in by_launch:
            by_launch[entry["launch"]].add(entry)
    return runs


def texts_of(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the texts of code that a record keeps, by their hashes; a launch has those that no earlier one has."""
    return {key: text for entry in entries if entry["kind"] == "launch" for key, text in entry["texts"].items()}


def write_copies(launch: Entry, entries: Iterable[Entry], folder: Path) -> list[Path]:
    """Write the code that a launch has kept into ``folder``, and return the files, each under a path like its own.

    Raises:
        OSError: a file can't be written, or is there already.
    """
    texts, written = texts_of(entries), list[Path]()
    for name in launch["code"]["copies"]:
        path = folder / Path(name).relative_to(Path(name).anchor)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb") as file:
            file.write(texts[launch["code"]["files"][name]].encode(errors="surrogateescape"))
        written.append(path)
    return written


@final
@dataclass(frozen=True)
class Comparison:
    """A run and its repetition, at the points of both.

    Attributes:
        equal: the points before the first difference.
        update: the update of the first difference; None without one.
        facts: what differs there.
        missing: points that the repetition hasn't reached.
    """

    equal: list[int]
    update: int | None
    facts: list[str]
    missing: list[int]


def compare(recorded: Points, again: Points, first: int, last: int) -> Comparison:
    """Compare the points from update ``first`` to ``last``."""
    chosen = [update for update in sorted(recorded) if first <= update <= last]
    shared = [update for update in chosen if update in again]
    for place, update in enumerate(shared):
        before, after = recorded[update], again[update]
        facts = [name for name in FACTS if name in before and name in after and before[name] != after[name]]
        if facts:
            return Comparison(shared[:place], update, facts, [])
    return Comparison(shared, None, [], [update for update in chosen if update > max(again, default=-1)])


def check_files(project: Path, chain: Chain) -> None:
    """Check the recorded checkpoints, and add what was changed or is gone to the chain's lists."""
    newest = {entry["folder"]: entry for entry in chain.entries if entry["kind"] == "checkpoint"}
    for folder, entry in newest.items():
        found = [] if "://" in folder else _changes(project / folder, entry)
        if "://" in folder:
            chain.notes.append(f"{folder} isn't on this machine's disks, so its files weren't checked.")
        elif found is None:
            chain.notes.append(f"The checkpoint {folder} is no longer there. It was removed, or its folder was moved.")
        else:
            chain.problems += found


def _changes(folder: Path, entry: Mapping[str, Any]) -> list[str] | None:
    """Return what has changed in a checkpoint; None if it isn't there."""
    if not folder.is_dir():
        return None
    path = folder / MANIFEST_NAME
    data = path.read_bytes() if path.is_file() else b""
    if hash_of(data) != entry["manifest"]:
        return [f"{path} was changed or removed since it was recorded."]
    try:
        found = problems(folder, Manifest.from_bytes(data).files, contents=True)
    except CheckpointError as error:
        found = [str(error)]
    return [f"{folder}: {problem}" for problem in found]
