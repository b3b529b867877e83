"""Numbered checkpoints of one run: ``{project_dir}/checkpoints/checkpoint_{n}``."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final, final
from uuid import uuid4

from ..errors import CheckpointError
from ..names import CHECKPOINT_NAME, CHECKPOINTS_FOLDER, RNG_STATE_NAME
from .manifest import Manifest, problems, read_manifest

_NUMBERED: Final = re.compile(rf"{CHECKPOINT_NAME}_(\d+)")
_TRASH: Final = re.compile(rf"\.{CHECKPOINT_NAME}_\d+\.trash-[0-9a-f]+")


def series_folder(project_dir: str | PathLike[str]) -> Path:
    """Where a project's numbered checkpoints lie."""
    return Path(project_dir) / CHECKPOINTS_FOLDER


def numbered(root: Path) -> list[tuple[int, Path]]:
    """The numbered folders in ``root``, oldest first, whether they are whole or not."""
    if not root.is_dir():
        return []
    found = [(match, path) for path in root.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found if path.is_dir())


def next_number(root: Path, at_least: int = 0) -> int:
    """The number of the next checkpoint: after every one on disk, and not before ``at_least``."""
    return max([at_least, *(number + 1 for number, _ in numbered(root))])


def numbered_folder(root: Path, number: int) -> Path:
    """The folder of checkpoint ``number``."""
    return root / f"{CHECKPOINT_NAME}_{number}"


def is_classic(folder: Path) -> bool:
    """True for a folder without a manifest that another program saved in the classic layout."""
    return (folder / f"{RNG_STATE_NAME}_0.pkl").is_file()


@dataclass(frozen=True)
@final
class Entry:
    """One checkpoint as a listing shows it: ``problem`` says why it can't be loaded, None when it can."""

    folder: Path
    manifest: Manifest | None
    problem: str | None

    @property
    def num_bytes(self) -> int:
        """How much disk its files take."""
        if self.manifest is not None:
            return sum(record.size for record in self.manifest.files.values())
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def inspect(folder: Path, *, contents: bool = False) -> Entry:
    """What is in ``folder``; with ``contents`` every byte is compared with the manifest."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Entry(folder, None, str(error))
    if manifest is None:
        return Entry(folder, None, None if is_classic(folder) else "no manifest: the save never finished")
    found = problems(folder, manifest.files, contents=contents)
    return Entry(folder, manifest, "; ".join(found) or None)


def list_checkpoints(root: str | PathLike[str], *, contents: bool = False) -> list[Entry]:
    """Every numbered checkpoint in ``root`` (or in the project whose folder ``root`` is), oldest first."""
    folder = Path(root)
    if not numbered(folder) and series_folder(folder).is_dir():
        folder = series_folder(folder)
    return [inspect(path, contents=contents) for _, path in numbered(folder)]


def prune(root: Path, total_limit: int, committed: Path) -> list[Path]:
    """The newest ``total_limit`` whole checkpoints up to ``committed`` are left; the removed ones are handed back.

    A folder is renamed before it is emptied, so that a crash leaves no half checkpoint under a valid name.
    """
    for leftover in root.iterdir():
        if _TRASH.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    older = [path for _, path in numbered(root) if path.name != committed.name]
    mine = _NUMBERED.fullmatch(committed.name)
    if mine is not None:
        older = [path for number, path in numbered(root) if number < int(mine[1])]
    whole = [path for path in older if inspect(path).problem is None]
    kept = whole[max(0, len(whole) - (total_limit - 1)) :] if total_limit > 1 else []
    removed: list[Path] = []
    for path in older:
        if path not in kept:
            trash = path.with_name(f".{path.name}.trash-{uuid4().hex}")
            with suppress(FileNotFoundError):
                os.rename(path, trash)
                removed.append(path)
            shutil.rmtree(trash, ignore_errors=True)
    return removed
