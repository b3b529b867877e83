"""TCP ports of this host: is one taken, and which one is free."""

from __future__ import annotations

import socket
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
