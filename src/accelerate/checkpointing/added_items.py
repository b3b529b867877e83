"""Items that a late rank adds to a checkpoint which the main process has saved alone and committed.

The files come first and the manifest, which then lists them, last, each whole or not at all: whatever is killed, the
checkpoint stays valid. Nothing is added to a checkpoint that is gone or has been replaced meanwhile.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final, final

from ..distributed.call_rendezvous import CallParticipants
from ..errors import CheckpointError, CollectiveError
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .items import CheckpointItem
from .manifest import PIN_NAME, FileRecord, Manifest, measure, read_manifest
from .storage import LocalStorage, Storage, storage_of
from .store import StagingDirectory, file_names

#: In a manifest's details: the ranks whose own items are not in the checkpoint.
ABSENT_RANKS: Final = "absent_ranks"


@final
class AddedItems:
    """The items that one rank adds to a checkpoint that the main process has saved alone."""

    def __init__(self, participants: CallParticipants, ranks: Ranks) -> None:
        self._participants = participants
        self._folder = Path(tempfile.mkdtemp(prefix="accelerate-added-"))
        self.staging: StagingDirectory = StagingDirectory(
            self._folder / (Path(participants.address).name or "items"), False, ranks
        )
        self.staging.folder.mkdir()
        self.items: list[CheckpointItem] = []

    def add(self) -> None:
        """Wait until the main process has committed, and add the files.

        Raises:
            CheckpointError: the main process couldn't save, or these items couldn't be written.
        """
        address = self._participants.address
        try:
            identity = self._participants.wait_for_outcome()
            for item in self.items:
                item.write(self.staging.create)
            with self._participants.exclusive():
                _add(storage_of(address), identity, self.staging)
        except FileNotFoundError:
            return  # it was removed meanwhile
        except (OSError, CollectiveError) as error:
            raise CheckpointError(f"can't save {address}: {error}") from error
        finally:
            self.items.clear()
            self.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _add(storage: Storage, identity: str, staging: StagingDirectory) -> None:
    manifest = read_manifest(storage)
    if manifest is None or manifest.identity != identity:
        return  # removed, or replaced by a later save
    added: dict[str, FileRecord] = {}
    for name in file_names(staging.folder):
        if name not in manifest.files and name not in (MANIFEST_NAME, PIN_NAME):
            added[name] = staging.records.get(name) or measure(staging.folder / name)
            _write(storage, name, (staging.folder / name).read_bytes())
    storage.write(MANIFEST_NAME, _with_added(manifest, staging, added).to_bytes())


def _write(storage: Storage, name: str, data: bytes) -> None:
    *parents, leaf = name.split("/")
    for parent in parents:
        storage = storage.child(parent)
        if isinstance(storage, LocalStorage):
            storage.path.mkdir(exist_ok=True)  # not the checkpoint's own folder: one that was removed stays so
    storage.write(leaf, data)


def _with_added(manifest: Manifest, staging: StagingDirectory, added: dict[str, FileRecord]) -> Manifest:
    absent = [rank for rank in manifest.details.get(ABSENT_RANKS, []) if rank != staging.ranks.rank]
    details = {name: value for name, value in manifest.details.items() if name != ABSENT_RANKS}
    pickled = sorted({*manifest.pickled, *(name for name in staging.pickled if name in added)})
    return replace(
        manifest,
        files={**manifest.files, **added},
        pickled=tuple(pickled),
        details={**details, **({ABSENT_RANKS: absent} if absent else {})},
    )
