"""The folder of one checkpoint: files are staged beside it and committed atomically.

A save has these steps; a crash between any two leaves a checkpoint that loads:

1. All files are written to ``.X.tmp-<uuid>`` beside ``X``, also those of hooks and strategies.
2. Every file is fsynced and measured, and all ranks confirm this.
3. The manifest is written into the staging directory last, and fsynced: from here on, the save can't be undone.
4. If the target doesn't exist, the directory is renamed to it. Else the files are moved one by one and the manifest
   last; other programs' files stay, and files of the previous checkpoint are removed. A reader that finds a target
   without a manifest finishes a move that a crash interrupted (:meth:`CheckpointStore.recover`).
5. All ranks confirm the commit; only then are older checkpoints pruned.

If nodes don't share a disk, each node's first rank stages and commits the folder of its node.
"""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final
from uuid import uuid4

from ..errors import CheckpointError, CheckpointNotFound
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .manifest import PIN_NAME, SILENT, ByteProgress, FileRecord, Manifest, measure, problems, read_manifest
from .storage import LocalStorage, check_name, fsync_path, inside

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..distributed.world import World
    from .tensor_files import Writable

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None
try:
    import msvcrt
except ImportError:  # every other system
    msvcrt: Any = None

_LOCK_SUFFIX: Final = ".lock"
_locks: dict[int, Path | None] = {}  # descriptor -> the lock file to remove, if there is one


def lock(folder: Path) -> int:
    """Lock ``folder`` until :func:`unlock`, or until this process ends; return the lock's descriptor."""
    beside = None if fcntl is not None else _lock_file_of(folder)
    descriptor = os.open(folder, os.O_RDONLY) if beside is None else os.open(beside, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # a file system without locks: staging directories there always look abandoned
        _try_to_lock(descriptor)
    _locks[descriptor] = beside
    return descriptor


def unlock(descriptor: int) -> None:
    """Release the lock of a descriptor from :func:`lock`."""
    if descriptor not in _locks:  # in a forked child: its copy is already closed
        return
    beside = _locks.pop(descriptor)
    os.close(descriptor)
    if beside is not None:
        with suppress(OSError):
            beside.unlink()


def is_locked(folder: Path) -> bool:
    """Return whether a live process, including this one, holds the lock of ``folder``.

    Return False if another job has removed the folder.
    """
    beside = None if fcntl is not None else _lock_file_of(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY) if beside is None else os.open(beside, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        _try_to_lock(descriptor)
    except OSError as error:
        return fcntl is None or isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def remove_lock_file(folder: Path) -> None:
    """Remove the lock file that a killed process left beside ``folder``."""
    if fcntl is None:
        with suppress(OSError):
            _lock_file_of(folder).unlink()


def _lock_file_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK_SUFFIX)


def _try_to_lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)


def _close_in_child() -> None:
    """Close all locks in a forked child, because a loader's worker that outlives its parent would hold them."""
    while _locks:
        os.close(_locks.popitem()[0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)

# ----------------------------------------------------------- the staging directory, and the interface of stores


@final
class DurableFile:
    """A file that computes size and checksum during writing, with an fsync at the end."""

    def __init__(self, path: Path, progress: ByteProgress = SILENT) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by close())
        self._progress = progress
        self._size = 0
        self._checksum = 0

    def write(self, data: Buffer, /) -> int:
        """Write all of ``data`` to the file, without an fsync."""
        rest = memoryview(data).cast("B")
        while rest:
            count = self._file.write(rest)
            self._checksum = zlib.crc32(rest[:count], self._checksum)
            self._size += count
            self._progress.advance(count)
            rest = rest[count:]
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing, because the file has no buffer."""

    def fsync_and_close(self) -> FileRecord:
        """Fsync and close the file; return its size and checksum."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._checksum)

    def close(self) -> None:
        """Close the file, without an fsync."""
        self._file.close()


@dataclass
@final
class StagingDirectory:
    """The staging directory of an unfinished checkpoint, and the files that this rank writes.

    Attributes:
        folder: the directory; hooks and strategies may write into it in any way.
        is_writer: whether this rank writes the common files of all ranks.
        ranks: the processes that write this checkpoint together.
        is_committer: whether this rank commits the staging directory of its node.
        description: the future manifest, without files.
        records: sizes and checksums of the files that this rank has written.
        pickled: the names of those files that are pickles.
        details: JSON values for the manifest, in addition to those of ``description``.
    """

    folder: Path
    is_writer: bool
    ranks: Ranks
    is_committer: bool = True
    description: Manifest = field(default_factory=lambda: Manifest({}))
    records: dict[str, FileRecord] = field(default_factory=dict)
    pickled: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    progress: ByteProgress = SILENT
    held: ExitStack = field(default_factory=ExitStack)  # the locks that mark the staging directory as in use

    @contextmanager
    def create(self, name: str, *, pickle: bool = False) -> Iterator[DurableFile]:
        """Yield a new file of the checkpoint, measured and fsynced at the end of the block."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = DurableFile(path, self.progress)
        try:
            yield file
            self.records[name] = file.fsync_and_close()
        finally:
            file.close()
        if pickle:
            self.pickled.append(name)


class Store(ABC):
    """The folder of one checkpoint, on a disk or in remote storage.

    Attributes:
        ranks: the processes that write or read it together. Every method is a collective.
    """

    ranks: Ranks
    identity: str = ""  # of the manifest that this process has committed here

    @property
    @abstractmethod
    def address(self) -> str:
        """The path or URL of the folder."""

    # ------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def begin(self, description: Manifest | None = None) -> StagingDirectory:
        """Make a staging directory; ``description`` is the future manifest, without files."""

    @abstractmethod
    def commit(self, staging: StagingDirectory) -> None:
        """Make the staged files the checkpoint in this folder."""

    @abstractmethod
    def abandon(self, staging: StagingDirectory) -> None:
        """Remove a staging directory that isn't committed."""

    @contextmanager
    def abandon_on_error(self, staging: StagingDirectory) -> Iterator[None]:
        """Enter a context; if it fails on any rank, abandon the staging directory and raise on all ranks.

        Raises:
            CheckpointError: on every rank, if any rank failed; the text has that rank and its reason.
        """
        try:
            with self.ranks.fail_together(f"save {self.address}"):
                yield
        except BaseException:  # also when the program is being ended
            self.abandon(staging)
            raise

    @contextmanager
    def committing(self, staging: StagingDirectory) -> Iterator[None]:
        """Enter a context as :meth:`abandon_on_error`, then commit the staging directory."""
        with staging.held:
            with self.abandon_on_error(staging):
                yield
            try:
                self.commit(staging)
            except BaseException:  # also when the program is being ended
                self.abandon(staging)
                raise

    # ------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def manifest(self) -> Manifest | None:
        """Read the manifest of the checkpoint here; None for a folder without one.

        Raises:
            CheckpointError: it is incomplete, from another program, or of a newer format.
        """

    @abstractmethod
    def require(self) -> None:
        """Raise if the folder doesn't exist.

        Raises:
            CheckpointNotFound: on every rank, if any rank doesn't see it.
        """

    @abstractmethod
    def problem(self) -> str | None:
        """Read every byte and describe why the checkpoint must not be loaded; None if it is valid."""

    @property
    @abstractmethod
    def readable(self) -> Path:
        """The local folder with the files to read, after a call of :meth:`problem`."""

    @abstractmethod
    def close(self) -> None:
        """Remove downloaded files."""


#: A function ``create(name, pickle=)`` that opens a new file of a checkpoint.
Create: TypeAlias = "Callable[..., AbstractContextManager[Writable]]"

# ------------------------------------------------------------------------------------ checkpoints on a local disk

_STAGING: Final = ".{name}.tmp-"


@final
class CheckpointStore(Store):
    """The folder of one checkpoint, on a disk.

    Args:
        folder: the folder of the checkpoint; it may not exist yet.
        world: the processes that take part; None means this process alone.
        on_each_node: the common files are written once per node instead of once (nodes that share the folder
            share the files).
        ranks: the processes that take part, in place of ``world``.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        world: World | None = None,
        *,
        on_each_node: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.folder: Path = Path(os.path.realpath(folder))
        self.ranks: Ranks = ranks or Ranks(world)
        self.on_each_node = on_each_node
        self._moving = False

    @property
    def address(self) -> str:
        """The folder's path."""
        return str(self.folder)

    # ------------------------------------------------------------------------------------------- writing

    def begin(self, description: Manifest | None = None) -> StagingDirectory:
        """Make a staging directory beside this folder; one on each node if nodes don't share the disk."""
        staging = StagingDirectory(Path(), False, self.ranks, False, description or Manifest({}))
        try:
            self._stage(staging)
        except BaseException:  # this rank may have made its folder, and another rank failed
            self.abandon(staging)
            raise
        return staging

    def _stage(self, staging: StagingDirectory) -> None:
        what = f"save {self.folder}"
        with self.ranks.fail_together(what):
            if self.ranks.is_main:
                self._make_staging(staging)
        first = next(path for path in self._staged(staging) if path is not None)
        with self.ranks.fail_together(what):
            if self.ranks.is_local_main and not first.exists():
                self._make_staging(staging)  # this node has a disk of its own
        folders = [path for path in self._staged(staging) if path is not None]
        with self.ranks.fail_together(what):
            visible = [path for path in folders if path.exists()]
            if not visible:
                raise CheckpointError(f"none of the staging folders is visible on this rank: {folders[0]}")
        staging.folder = visible[0]
        staging.is_writer = staging.is_committer and (self.ranks.is_main or self.on_each_node)

    def _staged(self, staging: StagingDirectory) -> list[Path | None]:
        return self.ranks.all_gather(staging.folder if staging.is_committer else None)

    def _make_staging(self, staging: StagingDirectory) -> None:
        check_name(self.folder)
        parent = self.folder.parent
        if self.folder.exists():
            if not self.folder.is_dir():
                raise NotADirectoryError(f"{self.folder} is a file, not a folder")
            mounted = self.folder.stat().st_dev != parent.stat().st_dev
            if mounted or not os.access(parent, os.W_OK):
                parent = self.folder  # files can only be moved within one file system
        parent.mkdir(parents=True, exist_ok=True)
        staging_path = parent / f"{_STAGING.format(name=self.folder.name)}{uuid4().hex}"
        staging_path.mkdir()
        staging.held.callback(unlock, lock(staging_path))
        staging.folder, staging.is_committer = staging_path, True

    def make_beside(self, staging: StagingDirectory) -> Path:
        """Make a locked folder beside a staging directory; readers find its manifest after a crash."""
        beside = staging.folder.with_name(f"{_STAGING.format(name=self.folder.name)}{uuid4().hex}")
        beside.mkdir()
        staging.held.callback(unlock, lock(beside))
        return beside

    def restore(self, beside: Path) -> None:
        """Move the checkpoint in ``beside``, a folder from :meth:`make_beside`, back here."""
        if (beside / MANIFEST_NAME).exists():
            self._move_in(beside)
        else:
            shutil.rmtree(beside, ignore_errors=True)

    def abandon(self, staging: StagingDirectory) -> None:
        """Remove the staging directory, unless its files are being moved; then the next reader finishes that."""
        staging.held.close()
        if staging.is_committer and not self._moving:
            shutil.rmtree(staging.folder, ignore_errors=True)

    def commit(self, staging: StagingDirectory) -> None:
        """Write the manifest of the staged files, and move them into the folder."""
        what = f"commit {self.folder}"
        records = {name: (record.size, record.crc32) for name, record in staging.records.items()}
        gathered = self.ranks.all_gather((staging.folder, records, staging.pickled, staging.details))
        with self.ranks.fail_together(what):
            if staging.is_committer:
                mine = [entry for entry in gathered if entry[0] == staging.folder]
                self._write_manifest(staging.folder, mine, staging.description)
        with self.ranks.fail_together(what):
            if staging.is_committer:
                self._move_to_target(staging.folder)
        if staging.is_committer:
            self._remove_leftovers()

    def _write_manifest(
        self,
        staging_path: Path,
        gathered: list[tuple[Path, dict[str, tuple[int, int]], list[str], dict[str, object]]],
        description: Manifest,
    ) -> None:
        recorded = {name: FileRecord(*record) for entry in gathered for name, record in entry[1].items()}
        names = file_names(staging_path)
        pickled = tuple(sorted({*(name for entry in gathered for name in entry[2]), *_shards(names)}))
        details = {**description.details}
        for entry in reversed(gathered):
            details.update(entry[3])
        files: dict[str, FileRecord] = {}
        for name in names:
            if name == MANIFEST_NAME:
                raise CheckpointError(f"{name} in a checkpoint folder is this library's own; write another name")
            if name == PIN_NAME:
                continue
            record = recorded.get(name)
            if record is None or (staging_path / name).stat().st_size != record.size:
                fsync_path(staging_path / name)
                record = measure(staging_path / name)
            files[name] = record
        for folder in {(staging_path / name).parent for name in files} | {staging_path}:
            fsync_path(folder)
        manifest = replace(
            description,
            files=files,
            pickled=pickled,
            details=details,
            world_size=self.ranks.world_size,
            replaces=self._replaced(files),
        ).with_identity()
        self.identity: str = manifest.identity
        LocalStorage(staging_path).write(MANIFEST_NAME, manifest.to_bytes())

    def _replaced(self, files: Mapping[str, FileRecord]) -> tuple[str, ...]:
        """Return the files of the existing checkpoint that the new one doesn't have."""
        try:
            before = read_manifest(self.folder)
        except CheckpointError:
            return ()  # incomplete or foreign: it is unknown which files belong to a checkpoint
        gone = sorted(set(before.files) - set(files)) if before else []
        for name in gone:
            inside(self.folder, name, self.folder / MANIFEST_NAME, is_replaced=True)
        return tuple(gone)

    def _move_to_target(self, staging_path: Path) -> None:
        if not self.folder.exists():
            os.rename(staging_path, self.folder)
            fsync_path(self.folder.parent)
            return
        self._check_manifest_is_ours()
        self._move_in(staging_path)

    def _check_manifest_is_ours(self) -> None:
        """Raise FileExistsError if another program wrote the file with the manifest's name."""
        try:
            read_manifest(self.folder)
        except CheckpointError as error:
            if "not written by this library" in str(error):
                raise FileExistsError(
                    f"{self.folder / MANIFEST_NAME} exists and {error}; choose another folder"
                ) from None

    def _move_in(self, staging_path: Path) -> None:
        manifest = read_manifest(staging_path)
        assert manifest is not None
        for name in (*manifest.files, *manifest.replaces):
            inside(self.folder, name, staging_path / MANIFEST_NAME, is_replaced=True)
        self._moving = True
        (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
        fsync_path(self.folder)
        for name in manifest.files:
            target = self.folder / name
            if (staging_path / name).exists():  # else it was moved before a crash
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staging_path / name, target)
        for name in manifest.replaces:
            (self.folder / name).unlink(missing_ok=True)
        for folder in {(self.folder / name).parent for name in manifest.files} | {self.folder}:
            fsync_path(folder)
        os.replace(staging_path / MANIFEST_NAME, self.folder / MANIFEST_NAME)
        fsync_path(self.folder)
        self._moving = False
        shutil.rmtree(staging_path, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- reading

    @property
    def readable(self) -> Path:
        """The folder itself."""
        return self.folder

    def close(self) -> None:
        """Do nothing, because no files were downloaded."""

    def manifest(self) -> Manifest | None:
        """Read the manifest of the checkpoint here; None for a folder without one."""
        return read_manifest(self.folder)

    def recover(self) -> bool:
        """Finish a commit that a crash interrupted; return whether there was one."""
        if (self.folder / MANIFEST_NAME).exists():
            return False
        complete: list[tuple[str, Path]] = []
        for staging_path in self._staging_paths():
            try:
                manifest = read_manifest(staging_path)
            except CheckpointError:
                continue
            if manifest is not None and not is_locked(staging_path) and self._can_finish(staging_path, manifest):
                complete.append((manifest.written_at, staging_path))
        if not complete:
            return False
        self._move_to_target(max(complete)[1])
        return True

    def _can_finish(self, staging_path: Path, manifest: Manifest) -> bool:
        if not (staging_path / MANIFEST_NAME).exists():
            return False  # another job has finished the commit, or removed the directory
        left = [name for name in manifest.files if (staging_path / name).exists()]
        moved = [name for name in manifest.files if name not in left]
        return not problems(staging_path, manifest.files, contents=False, names=left) and not problems(
            self.folder, manifest.files, contents=True, names=moved
        )

    def problem(self) -> str | None:
        """Describe why the checkpoint must not be loaded; ranks that see the same files divide the reading."""
        reason: str | None = None
        keys = self.ranks.all_gather(_identity_of(self.folder / MANIFEST_NAME))
        mine = keys[self.ranks.rank] if len(keys) > 1 else keys[0]
        readers = [rank for rank, key in enumerate(keys) if key == mine]
        try:
            reason = self._problem_here(readers.index(self.ranks.rank) if len(keys) > 1 else 0, len(readers))
        except CheckpointError as error:
            reason = str(error)
        found = self.ranks.all_gather(reason)
        return "; ".join(dict.fromkeys(text for text in found if text)) or None

    def _problem_here(self, reader: int, num_readers: int) -> str | None:
        manifest = self.manifest()
        if manifest is None:
            return f"no {MANIFEST_NAME}: the save never finished, or another program wrote the folder"
        # distributed by size, so that no rank reads most of the bytes
        names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        names = names[reader::num_readers]
        num_bytes = sum(manifest.files[name].size for name in names)
        with ByteProgress(f"Checking {self.folder.name}", num_bytes, shown=self.ranks.is_main) as progress:
            return (
                "; ".join(problems(self.folder, manifest.files, contents=True, names=names, progress=progress)) or None
            )

    def require(self) -> None:
        """Finish a commit that a crash interrupted; raise if the folder doesn't exist then.

        Raises:
            CheckpointNotFound: on every rank, if any rank doesn't see it.
        """
        for chosen in (self.ranks.is_main, self.ranks.is_local_main):  # then on nodes with their own disks
            with self.ranks.fail_together(f"finish the commit of {self.folder}"):
                if chosen:
                    self.recover()
        with self.ranks.fail_together(f"load {self.folder}", kind=CheckpointNotFound):
            if not self.folder.is_dir():
                raise CheckpointNotFound(f"no checkpoint folder at {self.folder}")

    # ------------------------------------------------------------------------------------------ leftovers

    def _staging_paths(self) -> list[Path]:
        prefix = _STAGING.format(name=self.folder.name)
        return [
            path
            for parent in (self.folder.parent, self.folder)
            if parent.is_dir()
            for path in sorted(parent.iterdir())
            # a link isn't ours: its target would be moved
            if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink()
        ]

    def _remove_leftovers(self) -> None:
        """Remove staging directories of earlier, killed saves of this folder; ignore errors."""
        for staging_path in self._staging_paths():
            if not is_locked(staging_path):
                shutil.rmtree(staging_path, ignore_errors=True)
                remove_lock_file(staging_path)


def _identity_of(path: Path) -> tuple[int, int, int]:
    """Return numbers that identify a file: equal for the same file, different for copies on several disks."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def file_names(folder: Path) -> list[str]:
    """Return the relative paths of the files in ``folder`` and its subfolders."""
    names: list[str] = []
    for parent, _, files in os.walk(folder):
        place = Path(parent).relative_to(folder).as_posix()
        names += files if place == "." else [f"{place}/{file}" for file in files]
    return sorted(names)


def _shards(names: Iterable[str]) -> list[str]:
    """Return the files of torch's distributed checkpoints; their metadata and entries without tensors are pickles."""
    return [name for name in names if name.endswith((".metadata", ".distcp"))]
