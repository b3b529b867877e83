"""Where a call came from, and whether that is the user's own code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Final

_PACKAGE: Final = str(Path(__file__).resolve().parent)
#: Files that are nobody's own code: installed packages and the interpreter's library.
_FOREIGN: Final = re.compile(r"site-packages|dist-packages|/lib/python3|^<frozen|\\lib\\", re.IGNORECASE)
#: What stands between the user's line and ours.
_BETWEEN: Final = (__name__.partition(".")[0], "torch", "contextlib")


def is_own(path: str) -> bool:
    """Return whether the file holds the user's code, not a library's and not ours."""
    return _FOREIGN.search(path) is None and not path.startswith(_PACKAGE)


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
    """Return where the nearest caller outside of this package and torch stands: ``train.py:31``."""
    frame = caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
