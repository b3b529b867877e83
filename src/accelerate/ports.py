"""TCP ports of this host: is one taken, and which one is free."""

from __future__ import annotations

import contextlib
import socket
import sys
from contextlib import closing
from typing import Final

#: The port at which processes meet unless another one is named.
DEFAULT_PORT: Final = 29500


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether something on this host listens on ``port`` (default 29500)."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(("localhost", int(DEFAULT_PORT if port is None else port))) == 0


def get_free_port() -> int:
    """A port that nothing on this host listens on now.

    Nothing keeps it free until the caller binds it; use it at once.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


#: What this process has claimed, by port: a claim ends with the process.
_claims: dict[int, socket.socket] = {}


def claim_port(port: int) -> bool:
    """Whether no other launch has chosen ``port`` for its ranks, and now none of this host will.

    A launcher only chooses the port; its rank 0 listens there seconds later. Between the two a second launcher would
    find it free, and the ranks of both would meet. Always True on other systems than Linux, which lack such names.
    """
    if port in _claims or not (sys.platform.startswith("linux") and hasattr(socket, "AF_UNIX")):
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0accelerate/port/{port}")
    except OSError:
        claim.close()
        return False
    _claims[port] = claim
    return True


def release_ports() -> None:
    """This process claims no port any more."""
    while _claims:
        with contextlib.suppress(OSError):
            _claims.popitem()[1].close()
