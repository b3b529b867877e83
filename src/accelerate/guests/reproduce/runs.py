"""The entries of a record as runs, the comparison of two of them, and why they may differ.

A run is a launch that began from nothing, with the launches that resumed it. A point is an update with recorded
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ...checkpointing.manifest import Manifest, problems
from ...errors import CheckpointError
from ...names import MANIFEST_NAME
from .chain import Chain, Entry, hash_of

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
        found = [] if "://" in folder else _changes_of_files(project / folder, entry)
        if "://" in folder:
            chain.notes.append(f"{folder} isn't on this machine's disks, so its files weren't checked.")
        elif found is None:
            chain.notes.append(f"The checkpoint {folder} is no longer there. It was removed, or its folder was moved.")
        else:
            chain.problems += found


def _changes_of_files(folder: Path, entry: Mapping[str, Any]) -> list[str] | None:
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


# --------------------------------------------------------------------------------------------------
# The differences between two launches that may be why their results differ

_WHAT: Final = {
    "code": "the code",
    "inputs": "a file that the command names",
    "packages": "a package",
    "variables": "an environment variable",
    "machine": "the processor, its threads or the device",
    "switches": "a switch of torch",
    "seeds": "the seed",
    "data": "the data",
    "layout": "the number of ranks or the strategy",
}
#: Kinds of differences, the likely cause first, by what differs first.
_ORDERS: Final = {
    "start": ("seeds", "code", "inputs", "packages", "layout", "switches", "variables", "machine", "data"),
    "data": ("inputs", "data", "code", "seeds", "packages", "layout", "variables", "switches", "machine"),
    "weights": ("code", "packages", "switches", "layout", "machine", "inputs", "variables", "data", "seeds"),
}


def differences(recorded: Entry, now: Entry) -> dict[str, list[str]]:
    """Return the differences between two launches in sentences, by kind."""
    before, after = map(_compared, (recorded, now))
    found = {kind: _changes(kind, before[kind], after[kind]) for kind in _WHAT}
    if recorded["updates"] != now["updates"]:
        del found["seeds"]  # a stream's state at another update
    return {kind: lines for kind, lines in found.items() if lines}


def explain(recorded: Entry, now: Entry, update: int, facts: Sequence[str]) -> list[str]:
    """Return lines that name the likely cause of a first difference, and then the other differences."""
    is_start = update <= recorded["updates"]
    order = _ORDERS["start" if is_start else "weights" if list(facts) == ["weights"] else "data"]
    found = differences(recorded, now)
    kinds = [kind for kind in order if kind in found]
    kinds.sort(key=lambda kind: kind != "layout" or recorded["ranks"] == now["ranks"])  # another number was asked for
    if kinds:
        first, *others = kinds
        lines = [f"Likely cause: {_WHAT[first]}.", *(f"  {line}" for line in found[first])]
        lines += ["Also different:"] if others else []
        return lines + [f"  {line}" for kind in others for line in found[kind]]
    if is_start:
        return ["Likely cause: the start. The weights aren't drawn from a seed that the script sets."]
    if recorded["updates"] < now["updates"]:
        return [
            "Likely cause: state that isn't in the checkpoint, such as a counter of the script. "
            "register_for_checkpointing adds it. If the run is equal without --from_update, this is the cause."
        ]
    if list(facts) != ["weights"]:
        return ["Likely cause: the data set, or its order. Code, files and seeds are equal."]
    return [
        "Likely cause: the computation. All recorded conditions are equal. So an operation isn't deterministic, "
        "samples between two fingerprints have changed, or hardware computes wrong. "
        "torch.use_deterministic_algorithms(True) makes torch name such an operation."
    ]


def _compared(entry: Entry) -> dict[str, Any]:
    """Return what is compared of a launch; the number of threads is a fact of the machine, however it was set."""
    loaders = enumerate(entry["data"])
    return {
        **entry,
        "code": entry["code"]["files"],
        "layout": {name: entry[name] for name in ("ranks", "strategy", "precision", "accumulation")},
        "data": {f"loader {number}, {name}": value for number, one in loaders for name, value in one.items()},
        "variables": {name: value for name, value in entry["variables"].items() if name != "OMP_NUM_THREADS"},
    }


def _changes(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if kind in ("code", "inputs"):
            state = "has changed" if old and new else "isn't used any more" if old else "wasn't used"
            lines.append(f"{Path(name).name} {state} ({name}).")
        else:
            lines.append(f"{name}: {_shown(new)} now, {_shown(old)} in the run.")
    return lines


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
