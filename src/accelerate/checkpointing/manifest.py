"""The manifest: what a checkpoint holds, byte for byte; its presence makes a folder a checkpoint.

Sizes and CRC-32 sums catch what disks, copies and crashes do to files. CRC-32 because it is the fastest sum of
the standard library (6 GB/s on the machine this was measured on; BLAKE2b 1.2, SHA-1 1.9, SHA-256 1.8), faster
than the disks it guards. It is no protection against a person who edits files on purpose; nothing is executed
from a checkpoint for that reason.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, cast, final
from uuid import uuid4

from ..errors import CheckpointError
from ..names import MANIFEST_NAME
from .inside import inside, reason_against
from .meter import SILENT, Meter
from .place import Place, place_of

FORMAT: Final = "accelerate-checkpoint"
FORMAT_VERSION: Final = 1
#: A file of this name keeps a checkpoint for good. The manifest doesn't list it: it may come and go.
PIN_NAME: Final = "pinned"
#: Where files arrive one by one, this one is the first to come and the last to go.
UNFINISHED_NAME: Final = ".unfinished"
_CHUNK_BYTES: Final = 2 << 20
_NUM_READERS: Final = 4


@dataclass(frozen=True)
@final
class FileRecord:
    """What one file of a checkpoint must be."""

    size: int
    crc32: int

    def difference(self, found: FileRecord) -> str | None:
        """In words, how ``found`` differs; None when it doesn't."""
        if found.size != self.size:
            verb = "truncated to" if found.size < self.size else "grown to"
            return f"{verb} {found.size} bytes of {self.size}"
        if found.crc32 != self.crc32:
            return f"its content changed (crc32 {found.crc32:08x}, written {self.crc32:08x})"
        return None


@dataclass(frozen=True)
@final
class Manifest:
    """What was saved, by whom, and the files that hold it."""

    files: dict[str, FileRecord]
    step: int = 0
    world_size: int = 1
    strategy: str = "NO"
    checkpoint_format: str = "safe"
    pickled: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()  # files of the checkpoint that lay in the folder before
    details: dict[str, Any] = field(default_factory=dict)
    written_at: str = ""
    identity: str = ""

    def signed(self) -> Manifest:
        """The same manifest with the time and an identity."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return replace(self, written_at=now, identity=uuid4().hex)

    def to_bytes(self) -> bytes:
        """The file ``manifest.json``."""
        content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        content["files"] = {
            name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in sorted(self.files.items())
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest in a file's bytes.

        Raises:
            CheckpointError: it is torn, something else's, or of a newer format.
        """
        try:
            content = json.loads(data)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST_NAME} is not whole ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{MANIFEST_NAME} was not written by this library")
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{MANIFEST_NAME} has format version {content.get('format_version')}, this library reads "
                f"{FORMAT_VERSION}"
            )
        try:
            return cls._from_content(cast("dict[str, Any]", content))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST_NAME} lacks a field or holds a wrong one ({error})") from error

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Manifest:
        files: dict[str, FileRecord] = {}
        for name, entry in content["files"].items():
            _refuse_name(name)
            files[name] = FileRecord(int(entry["size"]), int(entry["crc32"], 16))
        known = {key: content[key] for key in cls.__dataclass_fields__ if key in content}
        pickled, replaces = tuple(content.get("pickled", ())), tuple(content.get("replaces", ()))
        for name in replaces:
            _refuse_name(name)
        return cls(**{**known, "files": files, "pickled": pickled, "replaces": replaces})


def _refuse_name(name: str) -> None:
    reason = reason_against(name)
    if reason is not None:
        raise ValueError(f"the file name {name!r} {reason}")


def read_manifest(folder: Path | Place) -> Manifest | None:
    """The manifest of the checkpoint in ``folder``; None when there is none.

    Raises:
        CheckpointError: there is one that can't be trusted.
    """
    place = place_of(folder)
    try:
        data = place.read(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST_NAME} can't be read ({error})") from error
    return Manifest.from_bytes(data)


def measure(path: Path, meter: Meter = SILENT) -> FileRecord:
    """The size and checksum of a file as it lies on disk."""
    checksum = size = 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(view[:count], checksum)
            size += count
            meter.advance(count)
    return FileRecord(size, checksum)


def problems(
    folder: Path,
    files: Mapping[str, FileRecord],
    *,
    contents: bool,
    names: Iterable[str] | None = None,
    meter: Meter = SILENT,
) -> list[str]:
    """Each way in which files in ``folder`` differ from ``files``; with ``contents``, every byte is read."""
    chosen = sorted(files) if names is None else list(names)

    def check(name: str) -> str | None:
        return _problem(inside(folder, name, folder / MANIFEST_NAME), files[name], contents, meter)

    if contents and len(chosen) > 1:  # summing leaves the interpreter free for the next file
        with ThreadPoolExecutor(min(len(chosen), _NUM_READERS)) as pool:
            found = list(pool.map(check, chosen))
    else:
        found = [check(name) for name in chosen]
    return [f"{name}: {reason}" for name, reason in zip(chosen, found, strict=True) if reason is not None]


def _problem(path: Path, record: FileRecord, contents: bool, meter: Meter) -> str | None:
    try:
        size = path.stat().st_size
        differs = size != record.size or not contents
        return record.difference(FileRecord(size, record.crc32) if differs else measure(path, meter))
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"can't be read ({error})"
