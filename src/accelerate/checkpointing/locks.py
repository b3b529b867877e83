"""Marks on staging folders: a process that is alive writes into this one.

A mark ends with its process, however that ends. POSIX systems lock the folder itself. Windows can't open a folder, nor
rename one that holds an open file, so there a file beside it is locked.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None
try:
    import msvcrt
except ImportError:  # every other system
    msvcrt: Any = None

_SUFFIX: Final = ".lock"
_held: dict[int, Path | None] = {}  # descriptor -> the file to remove, where one was made


def lock(folder: Path) -> int:
    """Mark ``folder`` as in use until :func:`unlock`, or until this process dies; returns the mark."""
    beside = None if fcntl is not None else _beside(folder)
    descriptor = os.open(folder, os.O_RDONLY) if beside is None else os.open(beside, os.O_RDWR | os.O_CREAT)
    with suppress(OSError):  # a file system without locks: leftovers there look abandoned at once
        _try_to_lock(descriptor)
    _held[descriptor] = beside
    return descriptor


def unlock(mark: int) -> None:
    """The folder that ``mark`` belongs to is no longer in use by this process."""
    if mark not in _held:  # a forked child, whose copy is closed already
        return
    beside = _held.pop(mark)
    os.close(mark)
    if beside is not None:
        with suppress(OSError):
            beside.unlink()


def is_locked(folder: Path) -> bool:
    """Whether a process that is still alive, this one included, writes into ``folder``."""
    beside = None if fcntl is not None else _beside(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY) if beside is None else os.open(beside, os.O_RDWR)
    except FileNotFoundError:
        if beside is None:
            raise
        return False
    try:
        _try_to_lock(descriptor)
    except OSError as error:
        return fcntl is None or isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def remove_mark(folder: Path) -> None:
    """Remove what a killed process left beside ``folder``."""
    if fcntl is None:
        with suppress(OSError):
            _beside(folder).unlink()


def _beside(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


def _try_to_lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)


def _drop() -> None:
    """A forked child holds no lock: a loader's worker that outlives its parent would keep it."""
    while _held:
        os.close(_held.popitem()[0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop)
