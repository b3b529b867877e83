"""Names that a folder can't have on Windows, or has there under another name."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import PureWindowsPath
from typing import Final

from ..errors import CheckpointError

_PORTS: Final = frozenset(f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³")
_DEVICES: Final = _PORTS | {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}
_FORBIDDEN: Final = frozenset('<>:"|?*') | frozenset(map(chr, range(32)))


def problem_on_windows(path: str | PathLike[str]) -> str | None:
    """Why Windows can't make ``path`` (absolute, relative, with a drive or a share), or None where it can."""
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
    """Refuse a checkpoint folder that this system would make under another name, or not at all.

    Raises:
        CheckpointError: on Windows, for a device, a forbidden character, a dot or a space at the end.
    """
    problem = problem_on_windows(path) if is_windows else None
    if problem is not None:
        raise CheckpointError(f"No checkpoint can be saved as {os.fspath(path)!r} on Windows: {problem}. Rename it.")
