"""Connections that tell a rank when another rank's process has ended, however it ended.

The watched process only listens: its kernel accepts the connection, and closes it when the process ends. No thread has
to run for that, so a process that computes for long or holds the GIL still counts as running. Keepalive probes detect a
lost host.

The process that serves the ranks' store needs no other connection, because all others are connected to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, final

from ..settings.env import read

#: How long to connect to a process that listens.
_CONNECT_SECONDS: Final = 5.0
#: TCP keepalive: seconds of silence before the first probe, between probes, and how many may stay unanswered.
_PROBES: Final = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}
#: Values in the kernel's tables of TCP connections (/proc/self/net/tcp and tcp6).
_ESTABLISHED: Final = "01"
_IPV4_IN_IPV6: Final = "0000000000000000FFFF0000"


@final
class ExitWatch:
    """The connections of this process: one listening socket, and one to each watched rank."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None
        self._watched: dict[int, socket.socket] = {}
        self._num_watches: Counter[int] = Counter()

    def listen(self) -> tuple[str, int] | None:
        """Listen, and return the address at which others can watch this process; None if there is none."""
        if self._listening is None:
            with contextlib.suppress(OSError):
                family, host = _own_address()
                listening = socket.socket(family, socket.SOCK_STREAM)
                listening.bind((host, 0))
                listening.listen(128)
                os.register_at_fork(after_in_child=listening.close)  # else it stays open until the children end
                self._listening = listening
        return None if self._listening is None else self._listening.getsockname()[:2]

    def watch(self, rank: int, address: tuple[str, int]) -> bool:
        """Watch the process of ``rank``, which listens at ``address``; return whether it could be reached."""
        if rank not in self._watched:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in _known_options():
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _PROBES[option])
                self._watched[rank] = connection
        self._num_watches[rank] += rank in self._watched
        return rank in self._watched

    def unwatch(self, ranks: Iterable[int]) -> None:
        """Undo one :meth:`watch` of each of ``ranks``; undoing the last one closes the connection."""
        for rank in ranks:
            self._num_watches[rank] -= 1
            if self._num_watches[rank] == 0 and rank in self._watched:
                self._watched.pop(rank).close()

    @property
    def is_watching(self) -> bool:
        """Whether this process watches any other."""
        return bool(self._watched)

    def ended(self) -> list[int]:
        """Return the watched ranks whose processes have ended."""
        return [rank for rank, connection in self._watched.items() if _is_closed(connection)]

    def close(self) -> None:
        """Close all connections, as the end of this process would."""
        for connection in (self._listening, *self._watched.values()):
            if connection is not None:
                connection.close()
        self._listening = None
        self._watched.clear()
        self._num_watches.clear()


def has_clients(port: int) -> bool:
    """Return whether another process is connected to ``port``, which this process serves; True if unknown.

    It reads the kernel's tables of TCP connections, which only Linux has.
    """
    sockets = set(_own_sockets())
    clients: set[tuple[str, str]] = set()
    own: set[tuple[str, str]] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # not on this system, or without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                if state != _ESTABLISHED or rest[5] not in sockets:
                    continue
                here, there = _address(local), _address(remote)
                if int(here[1], 16) == port:
                    clients.add(there)
                if int(there[1], 16) == port:
                    own.add(here)
    # This process, which serves the store, is connected to it too; if that isn't in the tables, they show nothing.
    return not own or bool(clients - own)


def _own_sockets() -> Iterator[str]:
    """Yield the inode numbers of this process's sockets, by which the kernel's tables list them."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it has been closed
                kind, _, number = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
                if kind == "socket":
                    yield number.strip("[]")


def _address(text: str) -> tuple[str, str]:
    """Split an address of the kernel's tables into host and port; return IPv4-mapped IPv6 hosts as IPv4."""
    host, _, port = text.rpartition(":")
    return host.removeprefix(_IPV4_IN_IPV6), port


def _known_options() -> Iterator[str]:
    return (option for option in _PROBES if hasattr(socket, option))


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:  # it was reset, or the host didn't answer the probes
        return True


def _own_address() -> tuple[socket.AddressFamily, str]:
    """Return the address of this host on the route to rank 0's host, without sending a packet."""
    target = read("MASTER_ADDR") or socket.gethostname()
    family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return family, probe.getsockname()[0]
