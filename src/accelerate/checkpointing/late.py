"""A rank that comes to a save which the main process has made alone: it adds its part to the committed checkpoint.

The files come first and the manifest, which then lists them, last, each whole or not at all: whatever is killed, the
checkpoint stays valid. A checkpoint that is gone or has been replaced meanwhile needs no part.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final, final

from ..errors import CheckpointError, CollectiveError
from ..meeting import Attendance
from ..names import MANIFEST_NAME
from .agreement import Ranks
from .content import Part
from .draft import Draft
from .manifest import PIN_NAME, FileRecord, Manifest, measure, read_manifest
from .place import LocalPlace, Place, place_of
from .store import file_names

#: In a manifest's details: the ranks whose own parts are not in the checkpoint.
ABSENT_RANKS: Final = "absent_ranks"


@final
class LatePart:
    """What one rank adds to a checkpoint, collected when it came to the save."""

    def __init__(self, attendance: Attendance, ranks: Ranks) -> None:
        self._attendance = attendance
        self._folder = Path(tempfile.mkdtemp(prefix="accelerate-late-"))
        self.draft = Draft(self._folder / (Path(attendance.address).name or "part"), False, ranks)
        self.draft.folder.mkdir()
        self.parts: list[Part] = []

    def add(self) -> None:
        """Wait until the main process has committed, and add the files.

        Raises:
            CheckpointError: the main process couldn't save, or this part couldn't be written.
        """
        address = self._attendance.address
        try:
            identity = self._attendance.wait_for_outcome()
            for part in self.parts:
                part.write(self.draft.create)
            with self._attendance.turn():
                _add(place_of(address), identity, self.draft)
        except FileNotFoundError:
            return  # it was removed meanwhile
        except (OSError, CollectiveError) as error:
            raise CheckpointError(f"can't save {address}: {error}") from error
        finally:
            self.parts.clear()
            self.close()

    def close(self) -> None:
        """What was collected is gone."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _add(place: Place, identity: str, draft: Draft) -> None:
    manifest = read_manifest(place)
    if manifest is None or manifest.identity != identity:
        return  # removed, or replaced by a later save
    added: dict[str, FileRecord] = {}
    for name in file_names(draft.folder):
        if name not in manifest.files and name not in (MANIFEST_NAME, PIN_NAME):
            added[name] = draft.records.get(name) or measure(draft.folder / name)
            _write(place, name, (draft.folder / name).read_bytes())
    place.write(MANIFEST_NAME, _with_part(manifest, draft, added).to_bytes())


def _write(place: Place, name: str, data: bytes) -> None:
    *parents, leaf = name.split("/")
    for parent in parents:
        place = place.child(parent)
        if isinstance(place, LocalPlace):
            place.path.mkdir(exist_ok=True)  # not the checkpoint's own folder: one that was removed stays so
    place.write(leaf, data)


def _with_part(manifest: Manifest, draft: Draft, added: dict[str, FileRecord]) -> Manifest:
    absent = [rank for rank in manifest.details.get(ABSENT_RANKS, []) if rank != draft.ranks.rank]
    details = {name: value for name, value in manifest.details.items() if name != ABSENT_RANKS}
    pickled = sorted({*manifest.pickled, *(name for name in draft.pickled if name in added)})
    return replace(
        manifest,
        files={**manifest.files, **added},
        pickled=tuple(pickled),
        details={**details, **({ABSENT_RANKS: absent} if absent else {})},
    )
