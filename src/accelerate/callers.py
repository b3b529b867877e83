"""The call site of a call, and whether it is in the user's own code; warnings about old spellings."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Final

_PACKAGE: Final = str(Path(__file__).resolve().parent)
#: Files that aren't the user's code: installed packages and the interpreter's library.
_FOREIGN: Final = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen|\\lib\\", re.IGNORECASE)
#: Packages whose frames lie between the user's line and ours.
_BETWEEN: Final = (__name__.partition(".")[0], "torch", "contextlib")


def is_own(path: str) -> bool:
    """Return whether the file holds the user's code, not a library's and not ours."""
    return _FOREIGN.search(path) is None and not path.startswith(_PACKAGE)


def is_in_this_package(path: str) -> bool:
    """Return whether the file is one of this package's."""
    return path.startswith(_PACKAGE + os.sep)


def caller() -> FrameType:
    """Return the nearest frame outside of this package and torch; the outermost one, where there is no other."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _BETWEEN:
            break
        frame = frame.f_back
    return frame


def call_site() -> str:
    """Return the line of the nearest caller outside of this package and torch: ``train.py:31``."""
    frame = caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- warnings about old spellings: one for each line of the user's code, one in all for libraries -----------

_warned: Final[set[tuple[str, str, int]]] = set()
_is_muted: Final[ContextVar[bool]] = ContextVar("_is_muted", default=False)


def warn_of_old_spelling(message: str) -> None:
    """Warn (FutureWarning) at the place outside of this package that led here, once for each place in a process.

    A library's code can't be edited by whoever reads the warning: all places in libraries count as one.
    """
    if _is_muted.get():
        return
    frame = caller()
    path, line = frame.f_code.co_filename, frame.f_lineno
    place = (message, path, line) if is_own(path) else (message, "", 0)
    if place in _warned:
        return
    _warned.add(place)
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    warnings.warn_explicit(message, FutureWarning, path, line, module=module)


@contextmanager
def muted() -> Generator[None]:
    """Enter a context in which this thread doesn't warn about old spellings, for objects the user didn't construct."""
    token = _is_muted.set(True)
    try:
        yield
    finally:
        _is_muted.reset(token)
