"""Files that are named by another file are read, replaced and removed in that file's folder only.

A checkpoint comes from somebody else (compare GHSA-4j2p-28q2-5m79). What its index, manifest or metadata names must not
lead to other files of the machine that loads it, or saves over it, under the naming rules of any operating system.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from ..errors import CheckpointError


def reason_against(name: object) -> str | None:
    """Describe why ``name`` can't be the name of a file in a folder, on POSIX or Windows; None where it can."""
    if not isinstance(name, str) or not name or "\0" in name:
        return "is no file name"
    windows = PureWindowsPath(name)
    if name.startswith(("\\\\", "//")):
        return "is a network path"
    if windows.drive:
        return "names a drive"
    if PurePosixPath(name).is_absolute() or windows.root:
        return "is an absolute path"
    if ".." in windows.parts:  # which splits at both / and \
        return "leads out of the folder by `..`"
    return None if PurePosixPath(name).parts else "is no file name"


def inside(folder: str | PathLike[str], name: object, named_by: object, *, is_replaced: bool = False) -> Path:
    """Return the path of the file ``name`` in ``folder``, after having followed links.

    Links may lead to other places in the folder, and to the folder in which ``named_by`` really lies: in a cache of the
    Hugging Face Hub an index and the files that it names are links to neighbours.

    Args:
        named_by: the file, or the listing, that names it; for the error too.
        is_replaced: the file is created, moved or removed instead of read. A link of its name is then replaced itself,
            so only the links on the way to it are followed, and they must stay in ``folder``.

    Raises:
        CheckpointError: it is an absolute or network path, has a drive or `..`, or is a link that leads out.
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
    """Describe why Windows can't make ``path`` (absolute, relative, with a drive or a share); None where it can."""
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
