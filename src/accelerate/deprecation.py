"""Warnings about old spellings: one for each place in the user's code, one in all for the code of libraries."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from .callers import caller, is_own

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
    """A block in which this thread warns of no old spelling: what it constructs, nobody asked for."""
    token = _is_muted.set(True)
    try:
        yield
    finally:
        _is_muted.reset(token)
