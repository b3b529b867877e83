"""The manifest, which lists a checkpoint's files with sizes and checksums; a folder with one is a checkpoint.

Sizes and CRC-32 checksums detect damage by disks, copies and crashes. CRC-32 is the fastest checksum of the standard
library (6 GB/s on the machine this was measured on; BLAKE2b 1.2, SHA-1 1.9, SHA-256 1.8), and faster than disks. It
doesn't protect against deliberate changes; for that reason, no code in a checkpoint is executed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from abc import ABC
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TextIO, cast, final
from uuid import uuid4

from ..errors import CheckpointError
from ..names import MANIFEST_NAME
from .storage import Storage, inside, reason_against, storage_of

#: Progress is shown only for operations that take longer than this.
QUIET_SECONDS: Final = 1.0
_REDRAW_SECONDS: Final = 0.2
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes: ``1234567`` as ``1.2 MB``."""
    size, unit = float(num_bytes), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


@final
class ByteProgress:
    """A progress line with bytes done and total bytes; silent if the output isn't a terminal, or ``shown`` is False."""

    def __init__(self, what: str, num_bytes: int, *, shown: bool = True, output: TextIO | None = None) -> None:
        self._what = what
        self._total = num_bytes
        self._output = output or sys.stderr
        self._is_shown = shown and self._output.isatty()
        self._done = 0
        self._width = 0
        self._start = time.monotonic()
        self._next_draw = self._start + QUIET_SECONDS
        self._lock = threading.Lock()  # files are read by several threads

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more bytes as done."""
        if not self._is_shown:
            return
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now >= self._next_draw:
                self._next_draw = now + _REDRAW_SECONDS
                self._draw(now - self._start)

    def _draw(self, seconds: float) -> None:
        total = max(self._total, self._done)
        share = f"{100 * self._done // total}%" if total else ""
        rate = format_bytes(self._done / seconds)
        line = f"{self._what}: {share} {format_bytes(self._done)} of {format_bytes(total)}, {rate}/s"
        self._output.write("\r" + line.ljust(self._width))
        self._output.flush()
        self._width = len(line)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._output.write("\r" + " " * self._width + "\r")
            self._output.flush()


SILENT: Final = ByteProgress("", 0, shown=False)

# --------------------------------------------------------------------------------------------- the manifest

FORMAT: Final = "accelerate-checkpoint"
FORMAT_VERSION: Final = 1
#: A checkpoint with a file of this name is never pruned. The manifest doesn't list it, as pins can be removed.
PIN_NAME: Final = "pinned"
#: The file that marks a folder whose files are being written: written first, removed last.
UNFINISHED_NAME: Final = ".unfinished"
#: In the details of a manifest: the number of updates of each optimizer; ``updates`` is their maximum.
OPTIMIZER_UPDATES: Final = "optimizer_updates"
_CHUNK_BYTES: Final = 2 << 20
_NUM_READERS: Final = 4


def updates_in(details: Mapping[str, Any]) -> int:
    """Return the number of updates before a checkpoint, given the details of its manifest; 0 if they don't say it."""
    counts = details.get(OPTIMIZER_UPDATES)
    told = max(counts) if isinstance(counts, list) and counts else details.get("updates")  # as older checkpoints do
    return told if isinstance(told, int) else 0


@dataclass(frozen=True)
@final
class FileRecord:
    """The size and checksum of one file of a checkpoint."""

    size: int
    crc32: int

    def difference(self, found: FileRecord) -> str | None:
        """Describe how ``found`` differs; None if it is equal."""
        if found.size != self.size:
            verb = "truncated to" if found.size < self.size else "grown to"
            return f"{verb} {found.size} bytes of {self.size}"
        if found.crc32 != self.crc32:
            return f"its content changed (crc32 {found.crc32:08x}, written {self.crc32:08x})"
        return None


@dataclass(frozen=True)
@final
class Manifest:
    """The description of a checkpoint: its files with sizes and checksums, its step, world size and details."""

    files: dict[str, FileRecord]
    step: int = 0
    world_size: int = 1
    strategy: str = "NO"
    checkpoint_format: str = "safe"
    pickled: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()  # files of the checkpoint that this one replaces
    details: dict[str, Any] = field(default_factory=dict)
    written_at: str = ""
    identity: str = ""

    def with_identity(self) -> Manifest:
        """Return a copy of the manifest with the current time and a new identity."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return replace(self, written_at=now, identity=uuid4().hex)

    def to_bytes(self) -> bytes:
        """Serialize the manifest as the content of ``manifest.json``."""
        content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        content["files"] = {
            name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for name, record in sorted(self.files.items())
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the content of ``manifest.json``.

        Raises:
            CheckpointError: it is incomplete, from another program, or of a newer format.
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
        known = {key: content[key] for key in cls.__dataclass_fields__ if key in content}
        pickled, replaces = tuple(content.get("pickled", ())), tuple(content.get("replaces", ()))
        for name in (*content["files"], *replaces):
            if (reason := reason_against(name)) is not None:
                raise ValueError(f"the file name {name!r} {reason}")
        files = {
            name: FileRecord(int(entry["size"]), int(entry["crc32"], 16)) for name, entry in content["files"].items()
        }
        return cls(**{**known, "files": files, "pickled": pickled, "replaces": replaces})


class WithManifest(ABC):
    """A checkpoint with the epoch, metrics and fingerprint of its manifest, if it has one."""

    manifest: Manifest | None

    @property
    def epoch(self) -> int | None:
        """The epoch given to ``save_state``, else the first loader's."""
        return None if self.manifest is None else self.manifest.details.get("epoch")

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that were given to ``save_state``."""
        return {} if self.manifest is None else self.manifest.details.get("metrics", {})

    @property
    def fingerprint(self) -> str | None:
        """The SHA-256 of ``Accelerator.fingerprint()`` at the save; None if none was recorded."""
        return None if self.manifest is None else self.manifest.details.get("fingerprint")


def read_manifest(folder: Path | Storage) -> Manifest | None:
    """Read the manifest of the checkpoint in ``folder``; None if there is none.

    Raises:
        CheckpointError: it can't be read, or isn't valid.
    """
    storage = storage_of(folder)
    try:
        data = storage.read(MANIFEST_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST_NAME} can't be read ({error})") from error
    return Manifest.from_bytes(data)


def measure(path: Path, progress: ByteProgress = SILENT) -> FileRecord:
    """Read a file and return its size and checksum."""
    checksum = size = 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(view[:count], checksum)
            size += count
            progress.advance(count)
    return FileRecord(size, checksum)


def problems(
    folder: Path,
    files: Mapping[str, FileRecord],
    *,
    contents: bool,
    names: Iterable[str] | None = None,
    progress: ByteProgress = SILENT,
) -> list[str]:
    """Describe each file in ``folder`` that differs from ``files``; with ``contents``, compare checksums too."""
    chosen = sorted(files) if names is None else list(names)

    def check(name: str) -> str | None:
        return _problem(inside(folder, name, folder / MANIFEST_NAME), files[name], contents, progress)

    if contents and len(chosen) > 1:  # the checksum releases the GIL for the next file
        with ThreadPoolExecutor(min(len(chosen), _NUM_READERS)) as pool:
            found = list(pool.map(check, chosen))
    else:
        found = [check(name) for name in chosen]
    return [f"{name}: {reason}" for name, reason in zip(chosen, found, strict=True) if reason is not None]


def _problem(path: Path, record: FileRecord, contents: bool, progress: ByteProgress) -> str | None:
    try:
        size = path.stat().st_size
        differs = size != record.size or not contents
        return record.difference(FileRecord(size, record.crc32) if differs else measure(path, progress))
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"can't be read ({error})"
