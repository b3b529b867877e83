"""A command and its environment in one word of letters, digits, ``-``, ``_`` and ``=``, and the program that
opens it.

Some launchers put what they are given on a remote shell's command line as it is. A parcel has nothing in it
that a shell would look at. This file also runs alone, ``python parcel.py WORD``, and then takes its program's
place.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence


def pack(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """The word that :func:`unpack` turns back into both."""
    text = json.dumps([list(argv), dict(environment)], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii")


def unpack(word: str) -> tuple[list[str], dict[str, str]]:
    """(command line, environment on top of the one that is there)."""
    argv, environment = json.loads(base64.urlsafe_b64decode(word).decode("utf-8", "surrogateescape"))
    return argv, environment


def main() -> None:
    """Doesn't return: the packed command has this process's place."""
    argv, environment = unpack(sys.argv[1])
    # A file runs with its own folder first on sys.path; the program must not inherit a trace of it.
    os.execvpe(argv[0], argv, {**os.environ, **environment})


if __name__ == "__main__":
    main()
