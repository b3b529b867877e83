"""Storage of checkpoints: folders on a local disk or in remote storage, and safe file names.

Files that another file names are read, replaced and removed only in that file's folder. A checkpoint may come from
somebody else (compare GHSA-4j2p-28q2-5m79): names in its index, manifest or metadata must not lead to other files of
the machine that loads or replaces it, under the naming rules of any operating system.
"""

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
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, TypeVar, final
from uuid import uuid4

from ..errors import CheckpointError
from ..names import MANIFEST_NAME
from ..optional import require

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: How often a network operation is tried.
NUM_ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.5
#: Errors that retries can't fix.
_PERMANENT_ERRORS: Final = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
)
#: Packages whose errors are network errors, so a retry may succeed.
_NETWORK_PACKAGES: Final = frozenset({"aiohttp", "botocore", "urllib3", "requests", "httpx", "google", "azure"})


class Storage(ABC):
    """A folder in a storage; it may not exist yet."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the address, a path or a URL."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """Return the folder ``name`` in this one."""

    @abstractmethod
    def parent(self) -> Storage:
        """Return the parent folder."""

    @abstractmethod
    def folders(self) -> list[str]:
        """List the names of the subfolders."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """List all files, including subfolders, with their sizes in bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to a file atomically."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the folder; a crash midway never leaves a folder that looks like a checkpoint."""

    def holds(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self.files()


def storage_of(address: str | PathLike[str] | Storage) -> Storage:
    """Return the folder at a path or a URL."""
    if isinstance(address, Storage):
        return address
    text = os.fspath(address)
    scheme, separator, path = text.partition("://")
    if not separator:
        return LocalStorage(Path(text))
    return LocalStorage(Path(path)) if scheme in ("file", "local") else RemoteStorage.at(text)


@final
class LocalStorage(Storage):
    """A folder on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalStorage:
        """Return the folder ``name`` in this one."""
        return LocalStorage(self.path / name)

    def parent(self) -> LocalStorage:
        """Return the parent folder."""
        return LocalStorage(self.path.absolute().parent)

    def folders(self) -> list[str]:
        """List the names of the subfolders."""
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def files(self) -> dict[str, int]:
        """List all files with their sizes in bytes."""
        found = {path: path.stat() for path in self.path.rglob("*") if path.is_file()}
        return {path.relative_to(self.path).as_posix(): stat.st_size for path, stat in found.items()}

    def read(self, name: str) -> bytes:
        """Read a file."""
        try:
            return (self.path / name).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to a file atomically, and fsync it."""
        beside = self.path / f".{name}.{uuid4().hex}"
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path / name)
        finally:
            beside.unlink(missing_ok=True)
        fsync_path(self.path)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        (self.path / name).unlink(missing_ok=True)

    def holds(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self.path / name).is_file()

    def remove(self) -> None:
        """Rename the folder, then remove its files."""
        trash = self.path.with_name(f".{self.path.name}.trash-{uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(self.path, trash)
        shutil.rmtree(trash, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Fsync a file, or a folder's entries; Windows does the latter itself."""
    try:
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows needs write access
    except PermissionError:
        if path.is_dir():  # Windows can't open a folder
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():
            raise  # some file systems can't fsync folders; all can fsync a file
    finally:
        os.close(descriptor)


@final
class RemoteStorage(Storage):
    """A folder in a file system of fsspec: ``s3://``, ``gs://``, ``memory://``, ...

    Settings of the service (endpoint, credentials) come from its own variables and from fsspec's configuration.
    """

    def __init__(self, system: Any, path: str, url: str) -> None:
        self._system = system
        self.path: str = path.rstrip("/")
        self._url = url.rstrip("/")

    @classmethod
    def at(cls, url: str) -> RemoteStorage:
        """Return the folder at a URL.

        Raises:
            CheckpointError: no installed package supports the protocol.
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

    def child(self, name: str) -> RemoteStorage:
        """Return the folder ``name`` in this one."""
        return RemoteStorage(self._system, f"{self.path}/{name}", f"{self._url}/{name}")

    def parent(self) -> RemoteStorage:
        """Return the parent folder."""
        return RemoteStorage(self._system, self.path.rpartition("/")[0], self._url.rpartition("/")[0])

    def folders(self) -> list[str]:
        """List the names of the subfolders."""
        found = self._call("list", lambda: self._without_cache().ls(self.path, detail=True), missing=[])
        return [
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in found
            if entry["type"] == "directory" and entry["name"].strip("/") != self.path.strip("/")
        ]

    def files(self) -> dict[str, int]:
        """List all files with their sizes in bytes."""
        found: dict[str, Any] = self._call(
            "list", lambda: self._without_cache().find(self.path, detail=True), missing={}
        )
        start = len(self.path.strip("/")) + 1
        return {
            path.strip("/")[start:]: int(entry["size"] or 0)
            for path, entry in found.items()
            if entry["type"] == "file" and len(path.strip("/")) > start
        }

    def read(self, name: str) -> bytes:
        """Read a file."""
        return bytes(self._call(f"read {name} of", lambda: self._without_cache().cat_file(f"{self.path}/{name}")))

    def write(self, name: str, data: bytes) -> None:
        """Write ``data`` to a file; object stores write atomically."""
        self._call(f"write {name} in", lambda: self._system.pipe_file(f"{self.path}/{name}", data))

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        self._call(f"delete {name} of", lambda: self._system.rm_file(f"{self.path}/{name}"), missing=None)

    def remove(self) -> None:
        """Remove the manifest first, then everything else."""
        self.delete(MANIFEST_NAME)
        self._call("remove", lambda: self._without_cache().rm(self.path, recursive=True), missing=None)

    def upload(self, local: Path, name: str) -> None:
        """Upload a local file, and check its uploaded size."""

        def put() -> None:
            remote = f"{self.path}/{name}"
            self._system.put_file(str(local), remote)
            found, size = self._without_cache().info(remote)["size"], local.stat().st_size
            if found != size:
                raise OSError(f"{remote} has {found} bytes of {size}")

        self._call(f"upload {name} to", put)

    def download(self, name: str, local: Path) -> None:
        """Download a file to the path ``local``."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._call(f"download {name} from", lambda: self._system.get_file(f"{self.path}/{name}", str(local)))

    def copy(self, name: str, target: RemoteStorage) -> None:
        """Copy a file to ``target`` within the object store."""
        self._call(f"copy {name} from", lambda: self._system.cp_file(f"{self.path}/{name}", f"{target.path}/{name}"))

    def _without_cache(self) -> Any:
        """Return the file system without its cache of earlier listings."""
        self._system.invalidate_cache()
        return self._system

    def _call(self, what: str, call: Callable[[], T], **otherwise: T) -> T:
        """Return the result of ``call()``, or ``missing``, if given, for a missing file.

        Transient errors are retried with growing pauses; the last one is raised.
        """
        attempt = 1
        while True:
            try:
                return call()
            except Exception as error:  # the transient errors are those of packages that may not be installed
                if isinstance(error, FileNotFoundError) and "missing" in otherwise:
                    return otherwise["missing"]
                if attempt == NUM_ATTEMPTS or not _is_transient(error):
                    raise
                pause_seconds = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                message = "Attempt %d to %s %s failed (%s); again in %.1f s"
                _log.info(message, attempt, what, self, error, pause_seconds)
                time.sleep(pause_seconds)
                attempt += 1


def _is_transient(error: Exception) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT_ERRORS)
    return type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES


# --------------------------------------------------------------------- names of files that another file gives


def reason_against(name: object) -> str | None:
    """Describe why ``name`` isn't a safe file name in a folder, on POSIX or Windows; None if it is safe."""
    if not isinstance(name, str) or not name or "\0" in name:
        return "is no file name"
    windows = PureWindowsPath(name)
    if name.startswith(("\\\\", "//")):
        return "is a network path"
    if windows.drive:
        return "names a drive"
    if PurePosixPath(name).is_absolute() or windows.root:
        return "is an absolute path"
    if ".." in windows.parts:  # it splits at both / and \
        return "leads out of the folder by `..`"
    return None if PurePosixPath(name).parts else "is no file name"


def inside(folder: str | PathLike[str], name: object, named_by: object, *, is_replaced: bool = False) -> Path:
    """Return the path of the file ``name`` in ``folder``; raise if it leads out of the folder.

    Links may lead to other paths in the folder, and to the real folder of ``named_by``: in a cache of the Hugging Face
    Hub, an index and the files that it names are links into one folder.

    Args:
        named_by: the file or the listing that names it; also for the error message.
        is_replaced: the file is created, moved or removed instead of read. Then a link of this name is replaced itself,
            so only links in its parent folders are followed, and they must stay in ``folder``.

    Raises:
        CheckpointError: it is an absolute or network path, has a drive or `..`, or is a link to outside.
    """
    reason = reason_against(name)
    if reason is None:
        path = Path(folder) / str(name)
        real = path.parent.resolve() / path.name if is_replaced else path.resolve()
        roots = [Path(folder).resolve()]
        if isinstance(named_by, (str, PathLike)) and not is_replaced:
            roots.append(Path(named_by).resolve().parent)
        if any(real.is_relative_to(root) for root in roots):
            return path
        reason = f"is a link that leads to {real}"
    raise CheckpointError(
        f"{named_by} names the file {name!r}, which {reason}. The files of a checkpoint are read and replaced in its "
        f"own folder ({folder}) only, because a checkpoint of somebody else could name any file of this machine. If "
        "you trust it, copy the file into the folder and name it there."
    )


# --------------------------------------------------------- names that a folder can't have, or changes, on Windows

_PORTS: Final = frozenset(f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³")
_DEVICES: Final = _PORTS | {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}
_FORBIDDEN: Final = frozenset('<>:"|?*') | frozenset(map(chr, range(32)))


def problem_on_windows(path: str | PathLike[str]) -> str | None:
    """Describe why Windows can't make ``path`` (absolute, relative, with a drive or a share); None if it can."""
    parsed = PureWindowsPath(path)
    for part in parsed.parts[1:] if parsed.anchor else parsed.parts:
        if part.partition(".")[0].rstrip(" ").upper() in _DEVICES:
            return f"{part!r} is the name of a device"
        if forbidden := sorted(_FORBIDDEN.intersection(part)):
            return f"{part!r} has {', '.join(map(repr, forbidden))}"
        if part not in (".", "..") and part.endswith((".", " ")):
            return f"{part!r} ends with a dot or a space, which Windows leaves out: it would be another folder"
    return None


def check_name(path: str | PathLike[str], *, is_windows: bool = os.name == "nt") -> None:
    """Raise for a checkpoint folder that this system can't make, or would make under another name.

    Raises:
        CheckpointError: on Windows, for a device, a forbidden character, a dot or a space at the end.
    """
    problem = problem_on_windows(path) if is_windows else None
    if problem is not None:
        raise CheckpointError(f"No checkpoint can be saved as {os.fspath(path)!r} on Windows: {problem}. Rename it.")
