"""The call site of a call, and whether it is in the user's code; warnings about old spellings."""

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
#: Packages whose frames are between the user's line and ours.
_BETWEEN: Final = (__name__.partition(".")[0], "torch", "contextlib")


def is_own(path: str) -> bool:
    """Return whether the file is the user's code, as opposed to a library's or ours."""
    return _FOREIGN.search(path) is None and not path.startswith(_PACKAGE)


def is_in_this_package(path: str) -> bool:
    """Return whether the file belongs to this package."""
    return path.startswith(_PACKAGE + os.sep)


def caller() -> FrameType:
    """Return the nearest frame outside of this package and torch; the outermost frame if there is none."""
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
    """Warn (FutureWarning) at the calling line outside of this package, once per line and process.

    All lines in libraries count as one, because the reader of the warning can't edit them.
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
    """Enter a context without this thread's warnings about old spellings, for objects not created by the user."""
    token = _is_muted.set(True)
    try:
        yield
    finally:
        _is_muted.reset(token)
