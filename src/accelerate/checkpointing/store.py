"""One folder that holds one checkpoint: files are staged beside it, and committed all at once or not at all.

A save goes through these states; a crash between any two leaves a checkpoint that loads:

1. ``.X.tmp-<uuid>`` beside ``X`` takes every file; hooks and strategies write there too.
2. Every file is flushed to disk and measured, and all ranks agree that theirs are.
3. The manifest is written into the staging folder, last, and flushed: from here the save can only go forward.
4. A target that doesn't exist appears by one rename. Into one that does, the files move one by one and the
   manifest last; other people's files stay, files of the checkpoint that was there go. A reader that finds a
   target without a manifest finishes a move that a crash cut short (:meth:`CheckpointStore.recover`).
5. All ranks agree that it is done; only now may older checkpoints be pruned.

Where nodes don't share a disk, each node's first rank stages and commits the folder of its node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final
from uuid import uuid4

from ..errors import CheckpointError, CheckpointNotFound
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .draft import Draft, Store
from .inside import inside
from .locks import is_locked, lock, remove_mark, unlock
from .manifest import PIN_NAME, FileRecord, Manifest, measure, problems, read_manifest
from .meter import Meter
from .portable import check_name

if TYPE_CHECKING:
    from ..world import World

_STAGING: Final = ".{name}.tmp-"


@final
class CheckpointStore(Store):
    """The folder of one checkpoint, on a disk.

    Args:
        folder: where the checkpoint is, or will be.
        world: who takes part; None is one process by itself.
        on_each_node: the common files are written once per node instead of once (nodes that share the folder
            share the files).
        ranks: who takes part and how they talk, in place of ``world``.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        world: World | None = None,
        *,
        on_each_node: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.ranks = ranks or Ranks(world)
        self.on_each_node = on_each_node
        self._moving = False

    @property
    def address(self) -> str:
        """The folder's path."""
        return str(self.folder)

    # ------------------------------------------------------------------------------------------- writing

    def begin(self, description: Manifest | None = None) -> Draft:
        """A staging folder beside this one: on each node one, where nodes don't share the disk."""
        draft = Draft(Path(), False, self.ranks, False, description or Manifest({}))
        try:
            self._stage(draft)
        except BaseException:  # a rank that has made its folder learns here that another could not
            self.abandon(draft)
            raise
        return draft

    def _stage(self, draft: Draft) -> None:
        what = f"save {self.folder}"
        error: Exception | None = None
        try:
            if self.ranks.is_main:
                self._make_staging(draft)
        except OSError as problem:
            error = problem
        self.ranks.agree(error, what)
        first = next(path for path in self._staged(draft) if path is not None)
        try:
            if self.ranks.is_local_main and not first.exists():
                self._make_staging(draft)  # this node has a disk of its own
        except OSError as problem:
            error = problem
        self.ranks.agree(error, what)
        folders = [path for path in self._staged(draft) if path is not None]
        visible = [path for path in folders if path.exists()]
        if not visible:
            error = FileNotFoundError(f"none of the staging folders is visible on this rank: {folders[0]}")
        self.ranks.agree(error, what)
        draft.folder = visible[0]
        draft.is_writer = draft.is_committer and (self.ranks.is_main or self.on_each_node)

    def _staged(self, draft: Draft) -> list[Path | None]:
        return self.ranks.everyone(draft.folder if draft.is_committer else None)

    def _make_staging(self, draft: Draft) -> None:
        check_name(self.folder)
        parent = self.folder.parent
        if self.folder.exists():
            if not self.folder.is_dir():
                raise NotADirectoryError(f"{self.folder} is a file, not a folder")
            mounted = self.folder.stat().st_dev != parent.stat().st_dev
            if mounted or not os.access(parent, os.W_OK):
                parent = self.folder  # files can only be moved within one file system
        parent.mkdir(parents=True, exist_ok=True)
        staging = parent / f"{_STAGING.format(name=self.folder.name)}{uuid4().hex}"
        staging.mkdir()
        draft.held.callback(unlock, lock(staging))
        draft.folder, draft.is_committer = staging, True

    def make_beside(self, draft: Draft) -> Path:
        """A folder beside a draft, in use as long as the draft is, whose manifest a reader finds after a crash."""
        beside = draft.folder.with_name(f"{_STAGING.format(name=self.folder.name)}{uuid4().hex}")
        beside.mkdir()
        draft.held.callback(unlock, lock(beside))
        return beside

    def put_back(self, beside: Path) -> None:
        """The checkpoint that was moved into a folder of :meth:`make_beside` is here again."""
        if (beside / MANIFEST_NAME).exists():
            self._move_in(beside)
        else:
            shutil.rmtree(beside, ignore_errors=True)

    def abandon(self, draft: Draft) -> None:
        """The staging folder is gone, unless its files are on the move already: then the next reader finishes that."""
        draft.held.close()
        if draft.is_committer and not self._moving:
            shutil.rmtree(draft.folder, ignore_errors=True)

    def commit(self, draft: Draft) -> None:
        """The staged files, measured and on disk, and the manifest are in the folder."""
        what = f"commit {self.folder}"
        records = {name: (record.size, record.crc32) for name, record in draft.records.items()}
        told = self.ranks.everyone((draft.folder, records, draft.pickled, draft.details))
        error: Exception | None = None
        try:
            if draft.is_committer:
                mine = [entry for entry in told if entry[0] == draft.folder]
                self._write_manifest(draft.folder, mine, draft.description)
        except (OSError, CheckpointError) as problem:
            error = problem
        self.ranks.agree(error, what)
        try:
            if draft.is_committer:
                self._publish(draft.folder)
        except (OSError, CheckpointError) as problem:
            error = problem
        self.ranks.agree(error, what)
        if draft.is_committer:
            self._remove_leftovers()

    def _write_manifest(
        self,
        staging: Path,
        told: list[tuple[Path, dict[str, tuple[int, int]], list[str], dict[str, Any]]],
        description: Manifest,
    ) -> None:
        recorded = {name: FileRecord(*record) for entry in told for name, record in entry[1].items()}
        pickled = tuple(sorted({*(name for entry in told for name in entry[2]), *_shards(staging)}))
        details = {**description.details}
        for entry in reversed(told):
            details.update(entry[3])
        files: dict[str, FileRecord] = {}
        for name in file_names(staging):
            if name == MANIFEST_NAME:
                raise CheckpointError(f"{name} in a checkpoint folder is this library's own; write another name")
            if name == PIN_NAME:
                continue
            record = recorded.get(name)
            if record is None or (staging / name).stat().st_size != record.size:
                flush(staging / name)
                record = measure(staging / name)
            files[name] = record
        for folder in {(staging / name).parent for name in files} | {staging}:
            flush(folder)
        manifest = replace(
            description,
            files=files,
            pickled=pickled,
            details=details,
            world_size=self.ranks.world_size,
            replaces=self._replaced(files),
        ).signed()
        self.identity = manifest.identity
        write_durably(staging / MANIFEST_NAME, manifest.to_bytes())

    def _replaced(self, files: Mapping[str, FileRecord]) -> tuple[str, ...]:
        """Files of the checkpoint that is here now and that the new one doesn't have."""
        try:
            before = read_manifest(self.folder)
        except CheckpointError:
            return ()  # torn or foreign: nothing says which files were a checkpoint's
        gone = sorted(set(before.files) - set(files)) if before else []
        for name in gone:
            inside(self.folder, name, self.folder / MANIFEST_NAME, is_replaced=True)
        return tuple(gone)

    def _publish(self, staging: Path) -> None:
        if not self.folder.exists():
            os.rename(staging, self.folder)
            flush(self.folder.parent)
            return
        self._check_manifest_place()
        self._move_in(staging)

    def _check_manifest_place(self) -> None:
        """A file of that name that something else wrote is not ours to replace."""
        try:
            read_manifest(self.folder)
        except CheckpointError as error:
            if "not written by this library" in str(error):
                raise FileExistsError(
                    f"{self.folder / MANIFEST_NAME} exists and {error}; choose another folder"
                ) from None

    def _move_in(self, staging: Path) -> None:
        manifest = read_manifest(staging)
        assert manifest is not None
        for name in (*manifest.files, *manifest.replaces):
            inside(self.folder, name, staging / MANIFEST_NAME, is_replaced=True)
        self._moving = True
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        flush(self.folder)
        for name in manifest.files:
            target = self.folder / name
            if (staging / name).exists():  # else it was moved before a crash
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staging / name, target)
        for name in manifest.replaces:
            (self.folder / name).unlink(missing_ok=True)
        for folder in {(self.folder / name).parent for name in manifest.files} | {self.folder}:
            flush(folder)
        os.replace(staging / MANIFEST_NAME, self.folder / MANIFEST_NAME)
        flush(self.folder)
        self._moving = False
        shutil.rmtree(staging, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- reading

    @property
    def readable(self) -> Path:
        """The folder itself."""
        return self.folder

    def close(self) -> None:
        """Nothing was fetched."""

    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint here; None for a folder without one."""
        return read_manifest(self.folder)

    def recover(self) -> bool:
        """A commit that a crash cut short is finished; True when there was one."""
        if (self.folder / MANIFEST_NAME).exists():
            return False
        complete: list[tuple[str, Path]] = []
        for staging in self._stagings():
            try:
                manifest = read_manifest(staging)
            except CheckpointError:
                continue
            if manifest is not None and not is_locked(staging) and self._can_finish(staging, manifest):
                complete.append((manifest.written_at, staging))
        if not complete:
            return False
        self._publish(max(complete)[1])
        return True

    def _can_finish(self, staging: Path, manifest: Manifest) -> bool:
        left = [name for name in manifest.files if (staging / name).exists()]
        moved = [name for name in manifest.files if name not in left]
        return not problems(staging, manifest.files, contents=False, names=left) and not problems(
            self.folder, manifest.files, contents=True, names=moved
        )

    def problem(self) -> str | None:
        """Why the checkpoint here must not be loaded; the ranks of a node share the reading."""
        reason: str | None = None
        try:
            reason = self._problem_here()
        except CheckpointError as error:
            reason = str(error)
        found = self.ranks.everyone(reason)
        return "; ".join(dict.fromkeys(text for text in found if text)) or None

    def _problem_here(self) -> str | None:
        manifest = self.manifest()
        if manifest is None:
            return f"no {MANIFEST_NAME}: the save never finished, or another program wrote the folder"
        # spread by size, so that no rank of the node reads most of the bytes
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        names = names[self.ranks.local_rank :: self.ranks.local_size]
        num_bytes = sum(manifest.files[name].size for name in names)
        with Meter(f"Checking {self.folder.name}", num_bytes, shown=self.ranks.is_main) as meter:
            return "; ".join(problems(self.folder, manifest.files, contents=True, names=names, meter=meter)) or None

    def require(self) -> None:
        """The folder is there (a crash's unfinished commit is finished first).

        Raises:
            CheckpointNotFound: on every rank, when any rank doesn't see it.
        """
        error: Exception | None = None
        for chosen in (self.ranks.is_main, self.ranks.is_local_main):  # then nodes with disks of their own
            try:
                if chosen:
                    self.recover()
            except (OSError, CheckpointError) as problem:
                error = problem
            self.ranks.agree(error, f"finish the commit of {self.folder}")
        if not self.folder.is_dir():
            error = CheckpointNotFound(f"no checkpoint folder at {self.folder}")
        self.ranks.agree(error, f"load {self.folder}", kind=CheckpointNotFound)

    # ------------------------------------------------------------------------------------------ leftovers

    def _stagings(self) -> list[Path]:
        prefix = _STAGING.format(name=self.folder.name)
        return [
            path
            for parent in (self.folder.parent, self.folder)
            if parent.is_dir()
            for path in sorted(parent.iterdir())
            # a link isn't ours: what it leads to would be moved away
            if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink()
        ]

    def _remove_leftovers(self) -> None:
        """What earlier, killed saves of this folder left is gone; failing to remove it harms nothing."""
        for staging in self._stagings():
            if not is_locked(staging):
                shutil.rmtree(staging, ignore_errors=True)
                remove_mark(staging)


def file_names(folder: Path) -> list[str]:
    names: list[str] = []
    for parent, _, files in os.walk(folder):
        names += [(Path(parent) / file).relative_to(folder).as_posix() for file in files]
    return sorted(names)


def _shards(folder: Path) -> list[str]:
    """The files of torch's distributed checkpoints: their index is a pickle, and what isn't a tensor in them too."""
    return [name for name in file_names(folder) if name.endswith((".metadata", ".distcp"))]


def flush(path: Path) -> None:
    """A file's content, or a folder's list of names, is on disk; Windows writes the latter by itself."""
    try:
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # fsync needs a writer there
    except PermissionError:
        if path.is_dir():  # Windows opens no folder
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():
            raise  # some file systems can't flush folders; every one can flush a file
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """``path`` holds ``data``, whole and on disk, or is what it was before."""
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:  # half a file is no file, whatever stopped the writing
        beside.unlink(missing_ok=True)
        raise
    flush(path.parent)
