"""A checkpoint in remote storage: staged on a local disk, uploaded file by file, committed by its manifest.

An object store can't rename, so the commit differs from that on a disk (`store`):

1. Each node stages and measures its files on its own disk, exactly as for a local checkpoint.
2. The files are uploaded, with retries, and their uploaded sizes are checked.
3. When all ranks have uploaded their files, the manifest of all files is uploaded, which commits the checkpoint.

If ``X`` is a checkpoint already, the files are uploaded to ``.X.tmp-<uuid>/`` beside it; then the old manifest is
deleted, the files are copied within the store, and the manifest is written last. A reader that finds no manifest in
``X`` reads from ``.X.tmp-<uuid>/``.

Reading downloads the files to a local disk (``TMPDIR``), once per node, and compares every byte with the manifest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Final, final
from uuid import uuid4

from ..errors import CheckpointError, CheckpointNotFound
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .manifest import PIN_NAME, UNFINISHED_NAME, ByteProgress, FileRecord, Manifest, measure, read_manifest
from .storage import LocalStorage, RemoteStorage, Storage, inside, storage_of
from .store import CheckpointStore, StagingDirectory, Store

_NUM_TRANSFERS: Final = 4


def open_store(
    address: str | PathLike[str] | Storage, ranks: Ranks | None = None, *, on_each_node: bool = False
) -> Store:
    """Return the store of the checkpoint at a path or a URL, whether it exists or not."""
    storage = storage_of(address)
    ranks = ranks or Ranks()
    if isinstance(storage, LocalStorage):
        return CheckpointStore(storage.path, ranks=ranks, on_each_node=on_each_node)
    assert isinstance(storage, RemoteStorage)
    return RemoteStore(storage, ranks, on_each_node=on_each_node)


@final
class RemoteStore(Store):
    """The folder of one checkpoint in a file system of fsspec."""

    def __init__(self, storage: RemoteStorage, ranks: Ranks, *, on_each_node: bool = False) -> None:
        self.storage = storage
        self.ranks = ranks
        self._on_each_node = on_each_node
        self._local_store: CheckpointStore | None = None
        self._fetched: Path | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def address(self) -> str:
        """The folder's URL."""
        return str(self.storage)

    # ------------------------------------------------------------------------------------------- writing

    def begin(self, description: Manifest | None = None) -> StagingDirectory:
        """Make a staging directory on a local disk of each node."""
        folder = self.ranks.all_gather(Path(tempfile.gettempdir()) / f"accelerate-{uuid4().hex}" / self.storage.name)[0]
        self._local_store = CheckpointStore(folder, ranks=self.ranks, on_each_node=self._on_each_node)
        staging = self._local_store.begin(description)
        # made here: at the program's exit, when a background save may still run, no thread can be started
        self._pool = ThreadPoolExecutor(_NUM_TRANSFERS, thread_name_prefix="checkpoint transfer")
        staging.held.callback(self._pool.shutdown)
        return staging

    def abandon(self, staging: StagingDirectory) -> None:
        """Remove the local files; uploaded files have no manifest, and the next save removes them."""
        if self._local_store is not None:
            self._local_store.abandon(staging)
            shutil.rmtree(self._local_store.folder.parent, ignore_errors=True)

    def commit(self, staging: StagingDirectory) -> None:
        """Upload the staged files, and then their manifest."""
        assert self._local_store is not None
        self._local_store.commit(staging)
        self.identity: str = self._local_store.identity
        what = f"commit {self.address}"
        mine = self._local_store.manifest() if staging.is_committer else None
        records = {} if mine is None else {name: (file.size, file.crc32) for name, file in mine.files.items()}
        gathered = self.ranks.all_gather(records)
        owners = {name: rank for rank in reversed(range(len(gathered))) for name in gathered[rank]}
        target = self._upload_target()
        with self.ranks.fail_together(what):
            self._upload(target, [name for name in records if owners[name] == self.ranks.rank])
        with self.ranks.fail_together(what):
            if self.ranks.is_main and mine is not None:
                files = {name: FileRecord(*gathered[rank][name]) for name, rank in sorted(owners.items())}
                self._commit_manifest(target, replace(mine, files=files, replaces=self._replaced(files)))
        if staging.is_committer:
            shutil.rmtree(self._local_store.folder.parent, ignore_errors=True)

    def _upload_target(self) -> RemoteStorage:
        """Return the folder itself if it has no checkpoint, else a new folder beside it."""
        beside: str | None = None
        if self.ranks.is_main and self.storage.holds(MANIFEST_NAME):
            beside = f".{self.storage.name}.tmp-{uuid4().hex}"
        elif self.ranks.is_main:
            self.storage.write(UNFINISHED_NAME, b"")
        beside = self.ranks.all_gather(beside)[0]
        return self.storage if beside is None else self.storage.parent().child(beside)

    def _upload(self, target: RemoteStorage, names: list[str]) -> None:
        assert self._local_store is not None
        folder = self._local_store.folder
        if (folder / PIN_NAME).exists() and self.ranks.is_main:
            names = [*names, PIN_NAME]
        _all_at_once(self._pool, lambda name: target.upload(folder / name, name), names)

    def _replaced(self, files: dict[str, FileRecord]) -> tuple[str, ...]:
        try:
            before = read_manifest(self.storage)
        except CheckpointError:
            return ()  # incomplete or foreign: it is unknown which files belong to a checkpoint
        return tuple(sorted(set(before.files) - set(files))) if before else ()

    def _commit_manifest(self, target: RemoteStorage, manifest: Manifest) -> None:
        target.write(MANIFEST_NAME, manifest.to_bytes())
        if target is not self.storage:
            self.storage.delete(MANIFEST_NAME)
            _all_at_once(self._pool, lambda name: target.copy(name, self.storage), list(manifest.files))
            for name in manifest.replaces:
                self.storage.delete(name)
            self.storage.write(MANIFEST_NAME, manifest.to_bytes())
        self.storage.delete(UNFINISHED_NAME)
        for leftover in self._sibling_folders():
            leftover.remove()

    def _sibling_folders(self) -> list[RemoteStorage]:
        """Return the sibling folders of this save, or of earlier saves that were killed."""
        prefix, parent = f".{self.storage.name}.tmp-", self.storage.parent()
        return [parent.child(name) for name in parent.folders() if name.startswith(prefix)]

    # ------------------------------------------------------------------------------------------- reading

    def manifest(self) -> Manifest | None:
        """Read the manifest of the checkpoint here; None for a folder without one."""
        return read_manifest(self._source())

    def _source(self) -> RemoteStorage:
        """Return the folder, or the complete one beside it if a save is replacing it (or was killed)."""
        if self.storage.holds(MANIFEST_NAME):
            return self.storage
        complete: list[tuple[str, RemoteStorage]] = []
        for beside in self._sibling_folders():
            with suppress(CheckpointError):
                if (manifest := read_manifest(beside)) is not None:
                    complete.append((manifest.written_at, beside))
        return max(complete, key=lambda item: item[0])[1] if complete else self.storage

    def require(self) -> None:
        """Raise CheckpointNotFound on every rank if there are no files at the address."""
        with self.ranks.fail_together(f"load {self.address}", kind=CheckpointNotFound):
            if self.ranks.is_main and not self._source().files():
                raise CheckpointNotFound(f"no checkpoint at {self.address}")

    def problem(self) -> str | None:
        """Download the files to a local disk of each node; return why they must not be loaded, or None if valid."""
        self.close()
        self._fetched = self.ranks.all_gather(Path(tempfile.gettempdir()) / f"accelerate-{uuid4().hex}")[0]
        reason: str | None = None
        try:
            if self.ranks.is_local_main:
                reason = self._fetch(self._fetched)
        except Exception as problem:  # network errors have many types; every rank gets the reason
            reason = str(problem) or type(problem).__name__
        found = self.ranks.all_gather(reason)
        return "; ".join(dict.fromkeys(text for text in found if text)) or None

    def _fetch(self, folder: Path) -> str | None:
        folder.mkdir()
        source = self._source()
        manifest = read_manifest(source)
        if manifest is None:
            self._fetch_unmanaged(source, folder)
            return f"no {MANIFEST_NAME}: the save never finished, or another program wrote the folder"
        num_bytes = sum(record.size for record in manifest.files.values())
        reasons: dict[str, str] = {}
        with ByteProgress(f"Fetching {self.storage.name}", num_bytes, shown=self.ranks.is_main) as progress:

            def fetch(name: str) -> None:
                local = inside(folder, name, f"{self.address}/{MANIFEST_NAME}", is_replaced=True)
                reason = _fetched(source, name, manifest.files[name], local)
                if reason is not None:
                    reasons[name] = reason
                progress.advance(manifest.files[name].size)

            with ThreadPoolExecutor(_NUM_TRANSFERS) as pool:
                _all_at_once(pool, fetch, list(manifest.files))
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        return "; ".join(f"{name}: {reasons[name]}" for name in sorted(reasons)) or None

    def _fetch_unmanaged(self, source: RemoteStorage, folder: Path) -> None:
        """Download the files of another program, which can't be verified."""
        targets = {name: inside(folder, name, self.address, is_replaced=True) for name in source.files()}
        with ThreadPoolExecutor(_NUM_TRANSFERS) as pool:
            _all_at_once(pool, lambda name: source.download(name, targets[name]), list(targets))

    @property
    def readable(self) -> Path:
        """The local folder with the downloaded files."""
        assert self._fetched is not None, "problem() fetches the files"
        return self._fetched

    def close(self) -> None:
        """Remove the downloaded files."""
        if self._fetched is not None and self.ranks.is_local_main:
            shutil.rmtree(self._fetched, ignore_errors=True)
        self._fetched = None


def _fetched(source: RemoteStorage, name: str, record: FileRecord, local: Path) -> str | None:
    """Download a file, with one retry, and describe how it differs from the saved one; None if it is equal."""
    reason: str | None = None
    for _ in range(2):
        try:
            source.download(name, local)
        except FileNotFoundError:
            return "missing"
        reason = record.difference(measure(local))
        if reason is None:
            break
    return reason


def _all_at_once(pool: ThreadPoolExecutor | None, transfer: Callable[[str], object], names: list[str]) -> None:
    """Run all transfers, a few in parallel; raise the first error after all have ended."""
    assert pool is not None
    running = [pool.submit(transfer, name) for name in names]
    errors = [error for one in running if (error := one.exception()) is not None]
    if errors:
        raise errors[0]
