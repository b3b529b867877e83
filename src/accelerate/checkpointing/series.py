"""Numbered checkpoints of one run, ``{project_dir}/checkpoints/checkpoint_{n}``: which are there, which may go.

Needs no torch: a listing is quick.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final, final

from ..errors import CheckpointError, CheckpointNotFound
from ..names import CHECKPOINT_NAME, CHECKPOINTS_FOLDER, RNG_STATE_NAME
from ..settings.project import ProjectOptions
from .manifest import PIN_NAME, UNFINISHED_NAME, Manifest, problems, read_manifest
from .place import LocalPlace, Place, place_of

_NUMBERED: Final = re.compile(rf"{CHECKPOINT_NAME}_(\d+)")
_TRASH: Final = re.compile(rf"\.{CHECKPOINT_NAME}_\d+\.trash-[0-9a-f]+")


def series_place(project_dir: str | PathLike[str]) -> Place:
    """Where a project's numbered checkpoints lie."""
    return place_of(project_dir).child(CHECKPOINTS_FOLDER)


def numbered(root: Place) -> list[tuple[int, Place]]:
    """The numbered folders in ``root``, oldest first, whether they are whole or not."""
    found = [(match, name) for name in root.folders() if (match := _NUMBERED.fullmatch(name))]
    return [(number, root.child(name)) for number, name in sorted((int(match[1]), name) for match, name in found)]


def next_number(root: Place, at_least: int = 0) -> int:
    """The number of the next checkpoint: after every one that is there, and not before ``at_least``."""
    return max([at_least, *(number + 1 for number, _ in numbered(root))])


def numbered_place(root: Place, number: int) -> Place:
    """The folder of checkpoint ``number``."""
    return root.child(f"{CHECKPOINT_NAME}_{number}")


def number_of(address: str) -> int:
    """The number in the address of a numbered checkpoint."""
    return int(address.rpartition("_")[2])


def is_classic(place: Place) -> bool:
    """True for a folder without a manifest that another program saved in the classic layout."""
    return place.holds(f"{RNG_STATE_NAME}_0.pkl") and not place.holds(UNFINISHED_NAME)


# ------------------------------------------------------------------------------------------------ a listing


@dataclass(frozen=True)
@final
class Entry:
    """One checkpoint as a listing shows it: ``problem`` says why it can't be loaded, None when it can."""

    place: Place
    manifest: Manifest | None
    problem: str | None
    num_bytes: int = 0
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.place.name

    @property
    def number(self) -> int | None:
        """Its number in a series."""
        match = _NUMBERED.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def step(self) -> int | None:
        """The step that was told to ``save_state``, or else the Accelerator's own count."""
        return None if self.manifest is None else self.manifest.details.get("step", self.manifest.step)

    @property
    def epoch(self) -> int | None:
        """The epoch that was told to ``save_state``, or else that of its first loader."""
        return None if self.manifest is None else self.manifest.details.get("epoch")

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were told to ``save_state``."""
        return {} if self.manifest is None else self.manifest.details.get("metrics", {})

    def as_json(self) -> dict[str, Any]:
        """Everything that a listing shows, as JSON values."""
        manifest = self.manifest
        return {
            "folder": str(self.place),
            "name": self.name,
            "valid": self.problem is None,
            "problem": self.problem,
            "step": self.step,
            "epoch": self.epoch,
            "metrics": dict(self.metrics),
            "bytes": self.num_bytes,
            "pinned": self.is_pinned,
            "world_size": manifest.world_size if manifest else None,
            "strategy": manifest.strategy if manifest else None,
            "format": manifest.checkpoint_format if manifest else None,
            "pickled": list(manifest.pickled) if manifest else [],
            "selection": manifest.details.get("selection") if manifest else None,
            "written_at": manifest.written_at if manifest else None,
        }


def inspect(folder: str | PathLike[str] | Place, *, contents: bool = False) -> Entry:
    """What is in ``folder``; with ``contents`` every byte of it, on a disk, is compared with the manifest."""
    place = place_of(folder)
    files = place.files()
    is_pinned = PIN_NAME in files
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        return Entry(place, None, str(error), sum(files.values()), is_pinned)
    if manifest is None:
        problem = None if is_classic(place) else "no manifest: the save never finished"
        return Entry(place, None, problem, sum(files.values()), is_pinned)
    if isinstance(place, LocalPlace):
        try:
            found = problems(place.path, manifest.files, contents=contents)
        except CheckpointError as error:  # a link that leads out
            found = [str(error)]
    else:
        found = [f"{name}: {reason}" for name, reason in _differences(manifest, files).items()]
    num_bytes = sum(record.size for record in manifest.files.values())
    return Entry(place, manifest, "; ".join(found) or None, num_bytes, is_pinned)


def _differences(manifest: Manifest, files: Mapping[str, int]) -> dict[str, str]:
    sizes = {name: files.get(name) for name in manifest.files}
    return {
        name: "missing" if size is None else f"{size} bytes of {manifest.files[name].size}"
        for name, size in sizes.items()
        if size != manifest.files[name].size
    }


def list_checkpoints(root: str | PathLike[str] | Place, *, contents: bool = False) -> list[Entry]:
    """Every checkpoint in ``root``, oldest first.

    ``root`` is the folder that holds them, or the project's folder, or one checkpoint itself. Where nothing is
    numbered, every folder with a manifest counts, in the order in which they were written.
    """
    place = _root_of(root)
    return [inspect(one, contents=contents) for _, one in numbered(place) or written(place)]


def _root_of(root: str | PathLike[str] | Place) -> Place:
    place = place_of(root)
    inner = place.child(CHECKPOINTS_FOLDER)
    return inner if not numbered(place) and numbered(inner) else place


def written(root: str | PathLike[str] | Place) -> list[tuple[Any, Place]]:
    """The committed checkpoints in ``root``, whole or not, in the order of their numbers, or else of their dates."""
    place = _root_of(root)
    names = place.folders()
    series = numbered(place)
    if series:
        return [(number, one) for number, one in series if is_classic(one) or _date(one, names) is not None]
    dates = {place: _date(place, place.parent().folders())}
    dates |= {one: _date(one, names) for name in names if not name.startswith(".") for one in [place.child(name)]}
    found = [((date, one.name), one) for one, date in dates.items() if date is not None]
    return sorted(found, key=lambda item: item[0])


def _date(place: Place, siblings: list[str]) -> str | None:
    """When the checkpoint was written; None where there is none, not even one that a crash left half moved."""
    beside = [place.parent().child(name) for name in siblings if name.startswith(f".{place.name}.tmp-")]
    for one in (place, *beside):
        try:
            manifest = read_manifest(one)
        except CheckpointError:
            return ""  # the oldest of all: what is whole is tried before it
        if manifest is not None:
            return manifest.written_at
    return None


# -------------------------------------------------------------------------------------------- keeping some


def pin(folder: str | PathLike[str] | Place) -> None:
    """The checkpoint is kept, whatever the limits say.

    Raises:
        CheckpointNotFound: there is no such folder.
    """
    place = place_of(folder)
    if not place.files():
        raise CheckpointNotFound(f"no checkpoint at {place}")
    place.write(PIN_NAME, b"")


def unpin(folder: str | PathLike[str] | Place) -> None:
    """The checkpoint is subject to the limits again."""
    place_of(folder).delete(PIN_NAME)


def kept(entries: list[Entry], options: ProjectOptions) -> set[str]:
    """The names of those (whole, oldest first) that the options keep.

    They are the newest ``total_limit``; and besides: every ``keep_every``-th by number, the ``keep_best`` by the
    metric of that name, and those that are pinned.
    """
    limit = options.total_limit
    names = {entry.name for entry in (entries if limit is None else entries[-limit:])}
    names |= {entry.name for entry in entries if entry.is_pinned}
    if options.keep_every is not None:
        names |= {e.name for e in entries if e.number is not None and e.number % options.keep_every == 0}
    return names | {entry.name for entry in best(entries, options)}


def best(entries: list[Entry], options: ProjectOptions) -> list[Entry]:
    """The ``keep_best`` checkpoints by the metric, best first; of equals the newer one."""
    name = options.best_metric
    if name is None:
        return []
    sign = -1 if options.best_mode == "max" else 1
    rated = [
        (sign * value, -order, entry)
        for order, entry in enumerate(entries)
        if isinstance(value := entry.metrics.get(name), (int, float)) and not math.isnan(value)
    ]
    return [entry for _, _, entry in sorted(rated, key=lambda item: item[:2])[: options.keep_best]]


def prune(root: Place, options: ProjectOptions, committed: str) -> list[str]:
    """Of the checkpoints up to ``committed``, only those that the options keep are left; names of the removed ones.

    Broken ones that are older than ``committed`` count for nothing and go.
    """
    if isinstance(root, LocalPlace):
        for leftover in root.folders():  # a crash while an earlier one was emptied
            if _TRASH.fullmatch(leftover):
                root.child(leftover).remove()
    mine = _NUMBERED.fullmatch(committed)
    older = [place for number, place in numbered(root) if mine is None or number <= int(mine[1])]
    entries = {place.name: inspect(place) for place in older}
    whole = [entry for entry in entries.values() if entry.problem is None]
    stay = kept(whole, options) | {committed}
    removed = [name for name, entry in entries.items() if name not in stay and not entry.is_pinned]
    for name in removed:
        root.child(name).remove()
    return removed
