"""Save hooks see the folder where the checkpoint will be; what they write there becomes part of the draft.

A folder that isn't there yet is made for the hooks, marked as unfinished, and taken away again until the commit. A
checkpoint that is there already is set aside first, its manifest before its files, so that hooks can't overwrite it: a
crash leaves what the next reader puts together again (:meth:`CheckpointStore.recover`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from ..errors import CheckpointError
from ..names import MANIFEST_NAME
from .draft import Draft, Store
from .inside import inside
from .manifest import UNFINISHED_NAME, Manifest, read_manifest
from .store import CheckpointStore, file_names, flush

Hook = Callable[[str], None]


def run_hooks(store: Store, draft: Draft, hooks: Sequence[Hook]) -> None:
    """Every hook has run with the folder of the checkpoint; its files are in the draft. All ranks make this call.

    Behind a network, hooks get the staging folder of the draft: what they write must lie on a disk first.
    """
    if not any(store.ranks.everyone(bool(hooks))):
        return
    if not isinstance(store, CheckpointStore):
        for hook in hooks:
            hook(str(draft.folder))
        return
    what = f"save {store.folder}"
    opened = _OpenedFolder(store, draft)
    error: Exception | None = None
    try:
        try:
            if draft.is_committer:
                opened.prepare()
        except (OSError, CheckpointError) as problem:
            error = problem
        store.ranks.agree(error, what)
        try:
            for hook in hooks:
                hook(str(store.folder))
        except Exception as problem:  # a hook's own; raised again once every rank's hooks have ended
            error = problem
        store.ranks.agree(error, what)
    finally:
        if draft.is_committer:
            opened.close()


@final
class _OpenedFolder:
    """The folder of a checkpoint while hooks write into it."""

    def __init__(self, store: CheckpointStore, draft: Draft) -> None:
        self._folder, self._store, self._draft = store.folder, store, draft
        self._is_new = False
        self._aside: Path | None = None
        self._before: dict[str, tuple[int, ...]] | None = None  # until the folder is ready for hooks
        self._folders_before: set[str] = set()

    def prepare(self) -> None:
        """The folder is there, without a checkpoint; what lies in it is known."""
        if (self._folder / UNFINISHED_NAME).exists() and not (self._folder / MANIFEST_NAME).exists():
            shutil.rmtree(self._folder, ignore_errors=True)  # of hooks that were killed
        if not self._folder.exists():
            self._folder.mkdir()
            self._is_new = True
            (self._folder / UNFINISHED_NAME).touch()
        elif (manifest := read_manifest(self._folder)) is not None:
            self._set_aside(manifest)
        self._folders_before = {parent for parent, _, _ in os.walk(self._folder)}
        self._before = {name: self._stamp(name) for name in self._names()}

    def _set_aside(self, manifest: Manifest) -> None:
        for name in manifest.files:
            inside(self._folder, name, self._folder / MANIFEST_NAME, is_replaced=True)
        self._aside = self._store.make_beside(self._draft)
        for name in (MANIFEST_NAME, *manifest.files):
            if (self._folder / name).exists():
                (self._aside / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._folder / name, self._aside / name)
        flush(self._aside)

    def close(self) -> None:
        """What hooks have written is in the draft; the folder is as it was."""
        if self._before is not None:
            self._collect(self._before)
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self._aside is not None:
            self._store.put_back(self._aside)

    def _collect(self, before: dict[str, tuple[int, ...]]) -> None:
        """What hooks have written is in the draft, and not in the folder, unless it was there before."""
        for name in self._names():
            if before.get(name) == self._stamp(name):
                continue
            target = self._draft.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in before:
                shutil.copy2(self._folder / name, target)  # somebody else's: it stays, whatever becomes of the save
            else:
                os.replace(self._folder / name, target)
        if self._is_new:
            return
        for parent, _, _ in os.walk(self._folder, topdown=False):
            if parent not in self._folders_before:
                with suppress(OSError):  # not empty
                    os.rmdir(parent)

    def _names(self) -> list[str]:
        """The files in the folder, without those of drafts that lie in it."""
        own = f".{self._folder.name}.tmp-"
        found = file_names(self._folder) if self._folder.is_dir() else []
        return [name for name in found if name != UNFINISHED_NAME and not name.startswith(own)]

    def _stamp(self, name: str) -> tuple[int, ...]:
        found = (self._folder / name).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
