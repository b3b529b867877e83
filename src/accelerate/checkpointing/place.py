"""Folders of checkpoints, on a disk or behind a network: one set of calls for both. Needs no torch."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar, final
from uuid import uuid4

from ..errors import CheckpointError
from ..names import MANIFEST_NAME
from ..optional import require

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: A network that fails so often in a row has failed.
NUM_ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.5
#: Answers that stay the same however often one asks.
_FINAL_ANSWERS: Final = (*(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),)
#: Packages whose errors mean a network that may work the next time.
_NETWORK_PACKAGES: Final = frozenset({"aiohttp", "botocore", "urllib3", "requests", "httpx", "google", "azure"})


class Place(ABC):
    """A folder; what it is asked about need not exist."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @abstractmethod
    def __str__(self) -> str:
        """The address, as a person writes it."""

    @abstractmethod
    def child(self, name: str) -> Place:
        """A folder in this one."""

    @abstractmethod
    def parent(self) -> Place:
        """The folder that this one lies in."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders in this one."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Every file, also in folders of folders, with its size in bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """The file holds ``data``, whole or not at all."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """There is no such file."""

    @abstractmethod
    def remove(self) -> None:
        """The folder is gone; a crash on the way leaves nothing that looks like a checkpoint."""

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self.files()


def place_of(address: str | PathLike[str] | Place) -> Place:
    """The folder at a path or a URL."""
    if isinstance(address, Place):
        return address
    text = os.fspath(address)
    scheme, separator, path = text.partition("://")
    if not separator:
        return LocalPlace(Path(text))
    return LocalPlace(Path(path)) if scheme in ("file", "local") else RemotePlace.at(text)


@final
class LocalPlace(Place):
    """A folder on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalPlace:
        """A folder in this one."""
        return LocalPlace(self.path / name)

    def parent(self) -> LocalPlace:
        """The folder that this one lies in."""
        return LocalPlace(self.path.absolute().parent)

    def folders(self) -> list[str]:
        """The names of the folders in this one."""
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def files(self) -> dict[str, int]:
        """Every file with its size."""
        found = {path: path.stat() for path in self.path.rglob("*") if path.is_file()}
        return {path.relative_to(self.path).as_posix(): stat.st_size for path, stat in found.items()}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return (self.path / name).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def write(self, name: str, data: bytes) -> None:
        """The file holds ``data``, on disk."""
        beside = self.path / f".{name}.{uuid4().hex}"
        try:
            with open(beside, "wb") as file:
                file.write(data)
                os.fsync(file.fileno())
            os.replace(beside, self.path / name)
        finally:
            beside.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """There is no such file."""
        (self.path / name).unlink(missing_ok=True)

    def holds(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).is_file()

    def remove(self) -> None:
        """The folder is renamed, then emptied."""
        trash = self.path.with_name(f".{self.path.name}.trash-{uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(self.path, trash)
        shutil.rmtree(trash, ignore_errors=True)


@final
class RemotePlace(Place):
    """A folder in any file system that fsspec knows: ``s3://``, ``gs://``, ``memory://``, ...

    Settings of the service (endpoint, credentials) come from its own variables and from fsspec's configuration.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system = system
        self.path = path.rstrip("/")
        self._url = url.rstrip("/")

    @classmethod
    def at(cls, url: str) -> RemotePlace:
        """The folder at a URL.

        Raises:
            CheckpointError: no installed package knows the protocol.
        """
        fsspec = require("fsspec", "remote", purpose=f"{url}: a folder that is not on a disk")
        try:
            system, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{url}: {error}") from error
        return cls(system, path, url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return self._url

    def child(self, name: str) -> RemotePlace:
        """A folder in this one."""
        return RemotePlace(self._system, f"{self.path}/{name}", f"{self._url}/{name}")

    def parent(self) -> RemotePlace:
        """The folder that this one lies in."""
        return RemotePlace(self._system, self.path.rpartition("/")[0], self._url.rpartition("/")[0])

    def folders(self) -> list[str]:
        """The names of the folders in this one."""
        found = self._ask("list", lambda: self._fresh().ls(self.path, detail=True), missing=[])
        return [
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory" and entry["name"].strip("/") != self.path.strip("/")
        ]

    def files(self) -> dict[str, int]:
        """Every file with its size."""
        found: dict[str, Any] = self._ask("list", lambda: self._fresh().find(self.path, detail=True), missing={})
        start = len(self.path.strip("/")) + 1
        return {
            path.strip("/")[start:]: int(entry["size"] or 0)
            for path, entry in found.items()
            if entry["type"] == "file" and len(path.strip("/")) > start
        }

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return bytes(self._ask(f"read {name} of", lambda: self._fresh().cat_file(f"{self.path}/{name}")))

    def write(self, name: str, data: bytes) -> None:
        """The file holds ``data``: a store takes a whole object or none."""
        self._ask(f"write {name} in", lambda: self._system.pipe_file(f"{self.path}/{name}", data))

    def delete(self, name: str) -> None:
        """There is no such file."""
        self._ask(f"delete {name} of", lambda: self._system.rm_file(f"{self.path}/{name}"), missing=None)

    def remove(self) -> None:
        """The manifest first, then everything else."""
        self.delete(MANIFEST_NAME)
        self._ask("remove", lambda: self._fresh().rm(self.path, recursive=True), missing=None)

    def upload(self, local: Path, name: str) -> None:
        """The file holds what the local one holds, whole."""

        def put() -> None:
            remote = f"{self.path}/{name}"
            self._system.put_file(str(local), remote)
            found, size = self._fresh().info(remote)["size"], local.stat().st_size
            if found != size:
                raise OSError(f"{remote} has {found} bytes of {size}")

        self._ask(f"upload {name} to", put)

    def download(self, name: str, local: Path) -> None:
        """The local file holds what the file here holds."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._ask(f"download {name} from", lambda: self._system.get_file(f"{self.path}/{name}", str(local)))

    def copy(self, name: str, target: RemotePlace) -> None:
        """``target`` has the same file, copied within the store."""
        self._ask(f"copy {name} from", lambda: self._system.cp_file(f"{self.path}/{name}", f"{target.path}/{name}"))

    def _fresh(self) -> Any:
        """The file system, without what it remembers of earlier listings."""
        self._system.invalidate_cache()
        return self._system

    def _ask(self, what: str, call: Callable[[], T], **otherwise: T) -> T:
        """What the call returned, after as many attempts as it takes; ``missing`` where there is no such thing."""
        try:
            return persistently(call, f"{what} {self}")
        except FileNotFoundError:
            if "missing" in otherwise:
                return otherwise["missing"]
            raise


def persistently(call: Callable[[], T], what: str) -> T:
    """What ``call()`` returned; failures that may pass are met with patience, the last one is raised."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:  # which errors may pass depends on packages that need not be installed
            if attempt == NUM_ATTEMPTS or not _may_pass(error):
                raise
            pause_seconds = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            _log.info("Attempt %d to %s failed (%s); again in %.1f s", attempt, what, error, pause_seconds)
            time.sleep(pause_seconds)
    raise AssertionError("unreachable")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL_ANSWERS)
    return type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES
