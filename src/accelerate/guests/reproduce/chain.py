"""The file of a record: JSON lines, each with the hash of the line before and its own.

A line is appended by one write, so a process that is killed leaves whole lines and at most one torn line at the end. To
replace the whole file by a rename would cost more with every line, and lose what another process has appended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

#: The file's name in a run's folder.
LOCK: Final = "run.lock.json"
_OWN_HASH: Final = re.compile(rb', "hash": "([0-9a-f]{64})"\}')

_START: Final = b'{"kind": "'
#: What each kind of entry has in this version, besides the launch that has written it.
_FACTS: Final = {
    "launch": "number command project ranks strategy precision accumulation resumed code texts inputs packages "
    "variables machine switches seeds data updates weights",
    "update": "updates weights",
    "end": "updates weights",
    "checkpoint": "updates weights folder manifest",
    "load": "updates folder manifest",
    "failure": "updates error",
}
_OTHER: Final = "Line {1} of {0} is whole, but another version of accelerate has written it. It isn't read."
_TORN: Final = "Line {1} of {0} is torn, because its process was killed while it wrote. The lines before it are whole."

Entry = dict[str, Any]


@final
@dataclass
class Chain:
    """The entries of a file that are whole.

    Attributes:
        entries: those that this version can read.
        problems: lines that were changed, removed or added.
        notes: lines that a killed process has left unfinished, or another version has written.
        head: the hash of the last entry; "" without one.
    """

    entries: list[Entry] = field(default_factory=list[Entry])
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    head: str = ""


def hash_of(data: bytes) -> str:
    """Return the SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def read_chain(path: Path) -> Chain:
    """Read the file and check its hashes; a file that isn't there has no entries."""
    chain = Chain()
    *lines, rest = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    unread: list[int] = []  # the numbers of lines since the last entry that are none
    of_others: list[int] = []
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        entry = _checked(line)
        if entry is None:
            unread.append(number)
            continue
        if entry["previous"] != chain.head:
            chain.problems.append(f"{path.name} was changed before line {number}.")
        elif all(map(_is_torn, lines[number - 1 - len(unread) : number - 1])):
            chain.notes += [_TORN.format(path.name, _listed(unread))] if unread else []
        else:
            chain.problems.append(f"Line {_listed(unread)} of {path.name} was added, or changed.")
        unread = []
        if entry["kind"] in _FACTS and {"launch", *_FACTS[entry["kind"]].split()} <= entry.keys():
            chain.entries.append(entry)
        else:
            of_others.append(number)
        chain.head = entry["hash"]
    if of_others:
        chain.notes.append(_OTHER.format(path.name, _listed(of_others)))
    if any(line.endswith(b"\r") for line in lines):
        chain.problems.append(f"The line ends of {path.name} were converted (CRLF), so its hashes don't fit.")
    if unread and rest and not any(_OWN_HASH.search(one) for one in (*lines, rest)[unread[0] - 1 :]):
        chain.notes.append(_TORN.format(path.name, _listed(unread)))
    elif unread:
        chain.problems.append(f"Line {_listed(unread)} of {path.name}, the last one, was changed.")
    return chain


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _is_torn(line: bytes) -> bool:
    """Return whether a line is the beginning of an entry; a disk that lost its power has zeros there."""
    with suppress(ValueError):
        json.loads(line)
        return False  # the beginning of an object is no JSON
    return not line.strip(b"\0") or (_START.startswith(line[: len(_START)]) and _OWN_HASH.search(line) is None)


def _checked(line: bytes) -> Entry | None:
    """Return the entry of a line, if its own hash is right."""
    found = _OWN_HASH.search(line)
    if found is None or found.end() != len(line):
        return None
    return json.loads(line) if hash_of(line[: found.start()]).encode() == found[1] else None


@final
class ChainFile:
    """A file to which this process appends; other processes may append too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._head = -1, ""

    def append(self, entry: Mapping[str, object], *, is_durable: bool) -> None:
        """Append an entry; with ``is_durable``, wait until the disk has it.

        Raises:
            OSError: the file can't be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file, _locked(file):
            size, is_torn = file.seek(0, os.SEEK_END), False
            if size != self._size:  # the first time, or another process has written
                file.seek(max(0, size - 1))
                is_torn = file.read(1) not in (b"", b"\n")
                self._head = read_chain(self.path).head
            text = json.dumps({**entry, "previous": self._head})[:-1].encode()
            self._head = hash_of(text)
            file.write(b"\n" * is_torn + text + f', "hash": "{self._head}"}}\n'.encode())
            if is_durable:
                os.fsync(file.fileno())
            self._size = file.seek(0, os.SEEK_END)


@contextmanager
def _locked(file: IO[bytes]) -> Iterator[None]:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
    yield
