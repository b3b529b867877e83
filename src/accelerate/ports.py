"""TCP ports of this host: check if one is in use, find free ones, and claim them between launches."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from contextlib import closing
from typing import Final

#: The port of the rendezvous unless another one is given.
DEFAULT_PORT: Final = 29500
_LISTENING_PORTS: Final = (15_000, 32_000)
_NUM_ATTEMPTS: Final = 64


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a program on this host listens on ``port`` (default 29500)."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        return probe.connect_ex(("localhost", int(DEFAULT_PORT if port is None else port))) == 0


def get_free_port() -> int:
    """Return a port on which no program of this host listens, outside of the range for outgoing connections.

    The port may be taken before the caller binds it, which for a launcher is seconds later, in its rank 0. In the range
    for outgoing connections (from 32768 on Linux, 49152 elsewhere), any connection of any program could take it by
    then, even one that looks for this very port.
    """
    # Its own generator, so that the user's random state doesn't change and two launchers choose differently.
    choose = random.SystemRandom().randrange
    for port in (*(choose(*_LISTENING_PORTS) for _attempt in range(_NUM_ATTEMPTS)), 0):
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("No TCP port of this host is free.")


#: What this process has claimed, by port: a claim ends with the process.
_claims: dict[int, socket.socket] = {}


def claim_port(port: int) -> bool:
    """Claim ``port`` among the launches of this host; return whether no other launch has claimed it.

    A launcher only chooses the port; its rank 0 listens on it seconds later. In between, a second launcher would find
    it free, and the ranks of both would join one rendezvous. Always True on other systems than Linux, because they
    don't have abstract socket names.
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
    """Release this process's claims on ports."""
    while _claims:
        with contextlib.suppress(OSError):
            _claims.popitem()[1].close()
