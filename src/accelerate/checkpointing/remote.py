"""A checkpoint behind a network: staged on a local disk, uploaded file by file, committed by its manifest.

A store of objects has no rename, so a checkpoint appears in another way than on a disk (`store`):

1. Each node stages and measures its files on its own disk, exactly as for a local checkpoint.
2. The files are uploaded, each tried several times, and their sizes there are compared.
3. When all ranks have theirs up there, the manifest of all files is uploaded: with it the checkpoint exists.

Where a checkpoint is already, all this happens under ``.X.tmp-<uuid>/`` beside it; then the old manifest goes, the
files are copied within the store, and the manifest comes last. A reader that finds none in ``X`` reads from there.

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
from .draft import Draft, Store
from .inside import inside
from .manifest import PIN_NAME, UNFINISHED_NAME, FileRecord, Manifest, measure, read_manifest
from .meter import Meter
from .place import LocalPlace, Place, RemotePlace, place_of
from .store import CheckpointStore

_NUM_TRANSFERS: Final = 4


def open_store(
    address: str | PathLike[str] | Place, ranks: Ranks | None = None, *, on_each_node: bool = False
) -> Store:
    """The checkpoint at a path or a URL, whether it exists or not."""
    place = place_of(address)
    ranks = ranks or Ranks()
    if isinstance(place, LocalPlace):
        return CheckpointStore(place.path, ranks=ranks, on_each_node=on_each_node)
    assert isinstance(place, RemotePlace)
    return RemoteStore(place, ranks, on_each_node=on_each_node)


@final
class RemoteStore(Store):
    """The folder of one checkpoint in a file system that fsspec knows."""

    def __init__(self, place: RemotePlace, ranks: Ranks, *, on_each_node: bool = False) -> None:
        self.place = place
        self.ranks = ranks
        self._on_each_node = on_each_node
        self._staged: CheckpointStore | None = None
        self._fetched: Path | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def address(self) -> str:
        """The folder's URL."""
        return str(self.place)

    # ------------------------------------------------------------------------------------------- writing

    def begin(self, description: Manifest | None = None) -> Draft:
        """A staging folder on the disk of each node."""
        folder = self.ranks.everyone(Path(tempfile.gettempdir()) / f"accelerate-{uuid4().hex}" / self.place.name)[0]
        self._staged = CheckpointStore(folder, ranks=self.ranks, on_each_node=self._on_each_node)
        draft = self._staged.begin(description)
        # made here: at the end of a program, when a save in the background may still go on, threads can't be
        self._pool = ThreadPoolExecutor(_NUM_TRANSFERS, thread_name_prefix="checkpoint transfer")
        draft.held.callback(self._pool.shutdown)
        return draft

    def abandon(self, draft: Draft) -> None:
        """Nothing is left on the disk; what was uploaded has no manifest, and the next save removes it."""
        if self._staged is not None:
            self._staged.abandon(draft)
            shutil.rmtree(self._staged.folder.parent, ignore_errors=True)

    def commit(self, draft: Draft) -> None:
        """The staged files are up there, and then their manifest."""
        assert self._staged is not None
        self._staged.commit(draft)
        self.identity = self._staged.identity
        what = f"commit {self.address}"
        mine = self._staged.manifest() if draft.is_committer else None
        records = {} if mine is None else {name: (file.size, file.crc32) for name, file in mine.files.items()}
        told = self.ranks.everyone(records)
        owners = {name: rank for rank in reversed(range(len(told))) for name in told[rank]}
        target = self._upload_target()
        error: Exception | None = None
        try:
            self._upload(target, [name for name in records if owners[name] == self.ranks.rank])
        except Exception as problem:  # a network's errors have many names; raised again on every rank
            error = problem
        self.ranks.agree(error, what)
        try:
            if self.ranks.is_main and mine is not None:
                files = {name: FileRecord(*told[rank][name]) for name, rank in sorted(owners.items())}
                self._publish(target, replace(mine, files=files, replaces=self._replaced(files)))
        except Exception as problem:  # a network's errors have many names; raised again on every rank
            error = problem
        self.ranks.agree(error, what)
        if draft.is_committer:
            shutil.rmtree(self._staged.folder.parent, ignore_errors=True)

    def _upload_target(self) -> RemotePlace:
        """The folder itself while it holds no checkpoint, else one beside it."""
        beside: str | None = None
        if self.ranks.is_main and self.place.holds(MANIFEST_NAME):
            beside = f".{self.place.name}.tmp-{uuid4().hex}"
        elif self.ranks.is_main:
            self.place.write(UNFINISHED_NAME, b"")
        beside = self.ranks.everyone(beside)[0]
        return self.place if beside is None else self.place.parent().child(beside)

    def _upload(self, target: RemotePlace, names: list[str]) -> None:
        assert self._staged is not None
        folder = self._staged.folder
        if (folder / PIN_NAME).exists() and self.ranks.is_main:
            names = [*names, PIN_NAME]
        _all_at_once(self._pool, lambda name: target.upload(folder / name, name), names)

    def _replaced(self, files: dict[str, FileRecord]) -> tuple[str, ...]:
        try:
            before = read_manifest(self.place)
        except CheckpointError:
            return ()  # torn or foreign: nothing says which files were a checkpoint's
        return tuple(sorted(set(before.files) - set(files))) if before else ()

    def _publish(self, target: RemotePlace, manifest: Manifest) -> None:
        target.write(MANIFEST_NAME, manifest.to_bytes())
        if target is not self.place:
            self.place.delete(MANIFEST_NAME)
            _all_at_once(self._pool, lambda name: target.copy(name, self.place), list(manifest.files))
            for name in manifest.replaces:
                self.place.delete(name)
            self.place.write(MANIFEST_NAME, manifest.to_bytes())
        self.place.delete(UNFINISHED_NAME)
        for leftover in self._beside():
            leftover.remove()

    def _beside(self) -> list[RemotePlace]:
        """What this save, or earlier ones that were killed, put beside the folder."""
        prefix, parent = f".{self.place.name}.tmp-", self.place.parent()
        return [parent.child(name) for name in parent.folders() if name.startswith(prefix)]

    # ------------------------------------------------------------------------------------------- reading

    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint here; None for a folder without one."""
        return read_manifest(self._source())

    def _source(self) -> RemotePlace:
        """The folder, or what stands in for it while a save replaces it (or was killed at that)."""
        if self.place.holds(MANIFEST_NAME):
            return self.place
        complete: list[tuple[str, RemotePlace]] = []
        for beside in self._beside():
            with suppress(CheckpointError):
                if (manifest := read_manifest(beside)) is not None:
                    complete.append((manifest.written_at, beside))
        return max(complete, key=lambda item: item[0])[1] if complete else self.place

    def require(self) -> None:
        """There is something at the address."""
        error: Exception | None = None
        try:
            if self.ranks.is_main and not self._source().files():
                error = CheckpointNotFound(f"no checkpoint at {self.address}")
        except Exception as problem:  # a network's errors have many names; raised again on every rank
            error = problem
        self.ranks.agree(error, f"load {self.address}", kind=CheckpointNotFound)

    def problem(self) -> str | None:
        """Why the checkpoint here must not be loaded; its files are on the local disk of each node."""
        self.close()
        self._fetched = self.ranks.everyone(Path(tempfile.gettempdir()) / f"accelerate-{uuid4().hex}")[0]
        reason: str | None = None
        try:
            if self.ranks.is_local_main:
                reason = self._fetch(self._fetched)
        except Exception as problem:  # a network's errors have many names; the reason is told to every rank
            reason = str(problem) or type(problem).__name__
        found = self.ranks.everyone(reason)
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
        with Meter(f"Fetching {self.place.name}", num_bytes, shown=self.ranks.is_main) as meter:

            def fetch(name: str) -> None:
                local = inside(folder, name, f"{self.address}/{MANIFEST_NAME}", is_replaced=True)
                reason = _fetched(source, name, manifest.files[name], local)
                if reason is not None:
                    reasons[name] = reason
                meter.advance(manifest.files[name].size)

            with ThreadPoolExecutor(_NUM_TRANSFERS) as pool:
                _all_at_once(pool, fetch, list(manifest.files))
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        return "; ".join(f"{name}: {reasons[name]}" for name in sorted(reasons)) or None

    def _fetch_unmanaged(self, source: RemotePlace, folder: Path) -> None:
        """The files of another program, about which nothing can be checked."""
        targets = {name: inside(folder, name, self.address, is_replaced=True) for name in source.files()}
        with ThreadPoolExecutor(_NUM_TRANSFERS) as pool:
            _all_at_once(pool, lambda name: source.download(name, targets[name]), list(targets))

    @property
    def readable(self) -> Path:
        """Where the files were downloaded to."""
        assert self._fetched is not None, "problem() fetches the files"
        return self._fetched

    def close(self) -> None:
        """The downloaded files are gone."""
        if self._fetched is not None and self.ranks.is_local_main:
            shutil.rmtree(self._fetched, ignore_errors=True)
        self._fetched = None


def _fetched(source: RemotePlace, name: str, record: FileRecord, local: Path) -> str | None:
    """Why the downloaded file isn't what was saved; None when it is. A broken download gets a second chance."""
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
    """Every transfer is done, a few at a time; the first error is raised after the last has ended."""
    assert pool is not None
    running = [pool.submit(transfer, name) for name in names]
    errors = [error for one in running if (error := one.exception()) is not None]
    if errors:
        raise errors[0]
