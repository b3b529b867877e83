"""Numbered checkpoints of one run, ``{project_dir}/checkpoints/checkpoint_{n}``: listing, pinning and pruning.

This module doesn't import torch, so listings are fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Final, final

from ..errors import CheckpointError, CheckpointNotFound
from ..names import CHECKPOINT_NAME, CHECKPOINTS_FOLDER, RNG_STATE_NAME
from ..settings.training import ProjectOptions
from .manifest import PIN_NAME, UNFINISHED_NAME, Manifest, WithManifest, problems, read_manifest, updates_in
from .storage import LocalStorage, Storage, storage_of

if TYPE_CHECKING:
    from ..nested import Json

_NUMBERED: Final = re.compile(rf"{CHECKPOINT_NAME}_(\d+)")
_TRASH: Final = re.compile(rf"\.{CHECKPOINT_NAME}_\d+\.trash-[0-9a-f]+")


def series_storage(project_dir: str | PathLike[str]) -> Storage:
    """Return the folder of a project's numbered checkpoints."""
    return storage_of(project_dir).child(CHECKPOINTS_FOLDER)


def numbered(root: Storage) -> list[tuple[int, Storage]]:
    """List the numbered folders in ``root``, oldest first, valid or not."""
    found = [(match, name) for name in root.folders() if (match := _NUMBERED.fullmatch(name))]
    return [(number, root.child(name)) for number, name in sorted((int(match[1]), name) for match, name in found)]


def next_number(root: Storage, at_least: int = 0) -> int:
    """Return the number of the next checkpoint: above all existing ones, and at least ``at_least``."""
    return max([at_least, *(number + 1 for number, _ in numbered(root))])


def numbered_storage(root: Storage, number: int) -> Storage:
    """Return the folder of checkpoint ``number``."""
    return root.child(f"{CHECKPOINT_NAME}_{number}")


def number_of(address: str) -> int:
    """Return the number in the address of a numbered checkpoint."""
    return int(address.rpartition("_")[2])


def is_classic(storage: Storage) -> bool:
    """Return whether another program saved the folder in the classic layout, without a manifest."""
    return storage.holds(f"{RNG_STATE_NAME}_0.pkl") and not storage.holds(UNFINISHED_NAME)


# -------------------------------------------------------------------------------------------------- listing


@dataclass(frozen=True)
@final
class Entry(WithManifest):
    """One checkpoint of a listing; ``problem`` is the reason why it can't be loaded, or None."""

    storage: Storage
    manifest: Manifest | None
    problem: str | None
    num_bytes: int = 0
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.storage.name

    @property
    def number(self) -> int | None:
        """Its number in a series."""
        match = _NUMBERED.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def step(self) -> int | None:
        """The step that was given to ``save_state``, else the optimizer's updates, else the Accelerator's own count."""
        if self.manifest is None:
            return None
        details = self.manifest.details
        return details.get("step", updates_in(details) or self.manifest.step)

    def as_json(self) -> dict[str, Json]:
        """Return everything that a listing shows, as JSON values."""
        manifest = self.manifest
        return {
            "folder": str(self.storage),
            "name": self.name,
            "valid": self.problem is None,
            "problem": self.problem,
            "step": self.step,
            "epoch": self.epoch,
            "metrics": dict(self.metrics),
            "fingerprint": self.fingerprint,
            "bytes": self.num_bytes,
            "pinned": self.is_pinned,
            "world_size": manifest.world_size if manifest else None,
            "strategy": manifest.strategy if manifest else None,
            "format": manifest.checkpoint_format if manifest else None,
            "pickled": list(manifest.pickled) if manifest else [],
            "selection": manifest.details.get("selection") if manifest else None,
            "written_at": manifest.written_at if manifest else None,
        }


def inspect(folder: str | PathLike[str] | Storage, *, contents: bool = False) -> Entry:
    """Return the listing entry of ``folder``; with ``contents``, compare checksums too (on a local disk)."""
    storage = storage_of(folder)
    files = storage.files()
    is_pinned = PIN_NAME in files
    try:
        manifest = read_manifest(storage)
    except CheckpointError as error:
        return Entry(storage, None, str(error), sum(files.values()), is_pinned)
    if manifest is None:
        problem = None if is_classic(storage) else "no manifest: the save never finished"
        return Entry(storage, None, problem, sum(files.values()), is_pinned)
    if isinstance(storage, LocalStorage):
        try:
            found = problems(storage.path, manifest.files, contents=contents)
        except CheckpointError as error:  # a link to outside of the folder
            found = [str(error)]
    else:
        found = [f"{name}: {reason}" for name, reason in _differences(manifest, files).items()]
    num_bytes = sum(record.size for record in manifest.files.values())
    return Entry(storage, manifest, "; ".join(found) or None, num_bytes, is_pinned)


def _differences(manifest: Manifest, files: Mapping[str, int]) -> dict[str, str]:
    sizes = {name: files.get(name) for name in manifest.files}
    return {
        name: "missing" if size is None else f"{size} bytes of {manifest.files[name].size}"
        for name, size in sizes.items()
        if size != manifest.files[name].size
    }


def list_checkpoints(root: str | PathLike[str] | Storage, *, contents: bool = False) -> list[Entry]:
    """List all checkpoints in ``root``, oldest first.

    ``root`` is the folder that contains them, the project's folder, or one checkpoint. Without numbered folders, it
    lists every folder with a manifest, in the order in which they were written.
    """
    storage = _root_of(root)
    return [inspect(one, contents=contents) for _, one in numbered(storage) or list_committed(storage)]


def _root_of(root: str | PathLike[str] | Storage) -> Storage:
    storage = storage_of(root)
    inner = storage.child(CHECKPOINTS_FOLDER)
    return inner if not numbered(storage) and numbered(inner) else storage


def list_committed(root: str | PathLike[str] | Storage) -> list[tuple[int | tuple[str, str], Storage]]:
    """List the committed checkpoints in ``root``, valid or not, ordered by number, else by date."""
    storage = _root_of(root)
    names = storage.folders()
    series = numbered(storage)
    if series:
        return [(number, one) for number, one in series if is_classic(one) or _date(one, names) is not None]
    dates = {storage: _date(storage, storage.parent().folders())}
    dates |= {one: _date(one, names) for name in names if not name.startswith(".") for one in [storage.child(name)]}
    found = [((date, one.name), one) for one, date in dates.items() if date is not None]
    return sorted(found, key=lambda item: item[0])


def _date(storage: Storage, siblings: list[str]) -> str | None:
    """Return when the checkpoint was written; None if there is none, not even one partly moved into place."""
    beside = [storage.parent().child(name) for name in siblings if name.startswith(f".{storage.name}.tmp-")]
    for one in (storage, *beside):
        try:
            manifest = read_manifest(one)
        except CheckpointError:
            return ""  # the oldest of all, so valid ones are tried before it
        if manifest is not None:
            return manifest.written_at
    return None


# ------------------------------------------------------------------------------------- pinning and pruning


def pin(folder: str | PathLike[str] | Storage) -> None:
    """Mark the checkpoint to be kept, regardless of the limits.

    Raises:
        CheckpointNotFound: there is no such folder.
    """
    storage = storage_of(folder)
    if not storage.files():
        raise CheckpointNotFound(f"no checkpoint at {storage}")
    storage.write(PIN_NAME, b"")


def unpin(folder: str | PathLike[str] | Storage) -> None:
    """Remove the mark of :func:`pin`, so that the limits apply again."""
    storage_of(folder).delete(PIN_NAME)


def names_to_keep(entries: list[Entry], options: ProjectOptions) -> set[str]:
    """Return the names of the checkpoints to keep; ``entries`` are the valid ones, oldest first.

    These are the newest ``total_limit``, every ``keep_every``-th by number, the ``keep_best`` best ones by
    ``best_metric``, and the pinned ones.
    """
    limit = options.total_limit
    names = {entry.name for entry in (entries if limit is None else entries[-limit:])}
    names |= {entry.name for entry in entries if entry.is_pinned}
    if options.keep_every is not None:
        names |= {e.name for e in entries if e.number is not None and e.number % options.keep_every == 0}
    return names | {entry.name for entry in best(entries, options)}


def best(entries: list[Entry], options: ProjectOptions) -> list[Entry]:
    """Return the ``keep_best`` best checkpoints by the metric, best first; of equal ones, the newer first."""
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


def prune(root: Storage, options: ProjectOptions, committed: str) -> list[str]:
    """Remove the checkpoints up to ``committed`` that the options don't keep, and return their names.

    Invalid ones older than ``committed`` don't count towards the limits, and are removed.
    """
    if isinstance(root, LocalStorage):
        for leftover in root.folders():  # left by a crash during an earlier removal
            if _TRASH.fullmatch(leftover):
                root.child(leftover).remove()
    mine = _NUMBERED.fullmatch(committed)
    older = [storage for number, storage in numbered(root) if mine is None or number <= int(mine[1])]
    entries = {storage.name: inspect(storage) for storage in older}
    whole = [entry for entry in entries.values() if entry.problem is None]
    stay = names_to_keep(whole, options) | {committed}
    removed = [name for name, entry in entries.items() if name not in stay and not entry.is_pinned]
    for name in removed:
        root.child(name).remove()
    return removed
