"""A checkpoint that is being written, and what every place for checkpoints promises."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from .agreement import Ranks
from .manifest import FileRecord, Manifest
from .meter import SILENT, Meter


@final
class SealedFile:
    """A file that is measured while it is written, and flushed to disk when sealed."""

    def __init__(self, path: Path, meter: Meter = SILENT) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by close())
        self._meter = meter
        self._size = 0
        self._checksum = 0

    def write(self, data: Any, /) -> int:
        """All of ``data`` is in the file (not yet on disk)."""
        rest = memoryview(data).cast("B")
        while rest:
            count = self._file.write(rest)
            self._checksum = zlib.crc32(rest[:count], self._checksum)
            self._size += count
            self._meter.advance(count)
            rest = rest[count:]
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back: the file has no buffer."""

    def seal(self) -> FileRecord:
        """The file is on disk; what it must be from now on."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._checksum)

    def close(self) -> None:
        """The file is closed, on disk or not."""
        self._file.close()


@dataclass
@final
class Draft:
    """A checkpoint that is being written: the staging folder, and which of its files this rank writes.

    Attributes:
        folder: where files go; hooks and strategies may write into it by any means.
        is_writer: this rank writes the files that all ranks have in common.
        ranks: the processes that write this checkpoint together.
        is_committer: this rank turns the staging folder of its node into a checkpoint.
        details: what the manifest will record beside the files: JSON values.
    """

    folder: Path
    is_writer: bool
    ranks: Ranks
    is_committer: bool = True
    description: Manifest = field(default_factory=lambda: Manifest({}))
    records: dict[str, FileRecord] = field(default_factory=dict)
    pickled: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    meter: Meter = SILENT
    held: ExitStack = field(default_factory=ExitStack)  # the locks that mark the staging folder as in use

    @contextmanager
    def create(self, name: str, *, pickle: bool = False) -> Iterator[SealedFile]:
        """A new file of the checkpoint, measured and flushed at the end of the block."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = SealedFile(path, self.meter)
        try:
            yield file
            self.records[name] = file.seal()
        finally:
            file.close()
        if pickle:
            self.pickled.append(name)


class Store(ABC):
    """The place of one checkpoint: a folder, on a disk or behind a network.

    Attributes:
        ranks: the processes that write or read it together. Every method is one that all of them call.
    """

    ranks: Ranks
    identity: str = ""  # of the manifest that this process has committed here

    @property
    @abstractmethod
    def address(self) -> str:
        """The folder, as a person writes it."""

    # ------------------------------------------------------------------------------------------- writing

    @abstractmethod
    def begin(self, description: Manifest | None = None) -> Draft:
        """A staging folder; ``description`` is the manifest to be, without files."""

    @abstractmethod
    def commit(self, draft: Draft) -> None:
        """The draft is the checkpoint that is here."""

    @abstractmethod
    def abandon(self, draft: Draft) -> None:
        """A draft that was not committed leaves nothing behind."""

    @contextmanager
    def together(self, draft: Draft) -> Iterator[None]:
        """A block that all ranks leave well; or the draft is abandoned and all raise.

        Raises:
            CheckpointError: on every rank, when any rank failed; the text names that rank and its reason.
        """
        what = f"save {self.address}"
        try:
            try:
                yield
            except Exception as error:  # raised again below, once the other ranks know of it
                self.ranks.agree(error, what)
                raise
            self.ranks.agree(None, what)
        except BaseException:  # also when the program is being ended
            self.abandon(draft)
            raise

    @contextmanager
    def sealing(self, draft: Draft) -> Iterator[None]:
        """A block after which the draft is a checkpoint; as :meth:`together`."""
        with draft.held:
            with self.together(draft):
                yield
            try:
                self.commit(draft)
            except BaseException:  # also when the program is being ended
                self.abandon(draft)
                raise

    @contextmanager
    def draft(self, description: Manifest | None = None) -> Iterator[Draft]:
        """A staging folder for the block; on a clean exit of the block on every rank, the checkpoint."""
        draft = self.begin(description)
        with self.sealing(draft):
            yield draft

    # ------------------------------------------------------------------------------------------- reading

    @abstractmethod
    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint here; None for a folder without one.

        Raises:
            CheckpointError: it is torn, foreign, or of a newer format.
        """

    @abstractmethod
    def require(self) -> None:
        """The folder is there.

        Raises:
            CheckpointNotFound: on every rank, when any rank doesn't see it.
        """

    @abstractmethod
    def problem(self) -> str | None:
        """Why the checkpoint here must not be loaded; None when it is whole: every byte has been read."""

    @property
    @abstractmethod
    def readable(self) -> Path:
        """The folder from which its files can be read, once :meth:`problem` has looked at them."""

    @abstractmethod
    def close(self) -> None:
        """What was fetched in order to read it is gone."""


#: What opens a new file of a checkpoint.
Create = Callable[..., Any]
