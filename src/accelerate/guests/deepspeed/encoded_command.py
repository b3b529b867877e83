"""A command and its environment encoded as one argument, and the program that decodes and executes it.

Some launchers put their arguments unquoted on a remote shell's command line. An encoded command contains only letters,
digits, ``-``, ``_`` and ``=``, which no shell expands. This file also runs alone, as
``python encoded_command.py ENCODED``, and then replaces itself by the command.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence


def encode_command(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Encode a command line and its environment as one argument; :func:`decode_command` is the inverse."""
    text = json.dumps([list(argv), dict(environment)], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogateescape")).decode("ascii")


def decode_command(encoded: str) -> tuple[list[str], dict[str, str]]:
    """Decode (command line, variables to add to the environment)."""
    argv, environment = json.loads(base64.urlsafe_b64decode(encoded).decode("utf-8", "surrogateescape"))
    return argv, environment


def main() -> None:
    """Replace this process by the encoded command; doesn't return."""
    argv, environment = decode_command(sys.argv[1])
    # Python puts this file's folder first on sys.path; the program must not inherit that.
    os.execvpe(argv[0], argv, {**os.environ, **environment})


if __name__ == "__main__":
    main()
