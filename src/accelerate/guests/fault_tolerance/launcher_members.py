"""The launcher's part of a fault-tolerant run: it decides the membership and answers the members' exchanges.

It needs no torch. Everything runs on the supervisor's thread, so a rank's end is always before or after an exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from ...errors import LaunchError
from ...wording import by_number, some_ranks

#: The launcher's folder, with its socket and the files that ranks exchange.
REPLICAS_FOLDER_VARIABLE: Final = "ACCELERATE_REPLICAS_FOLDER"
#: Set in a process that replaces a lost rank.
REPLICA_JOINS_VARIABLE: Final = "ACCELERATE_REPLICA_JOINS"
#: The minimum number of living members; with fewer, they save and end.
REPLICAS_MINIMUM_VARIABLE: Final = "ACCELERATE_REPLICAS_MINIMUM"
#: The launcher's socket in that folder.
REPLICAS_SOCKET_NAME: Final = "members"
_FOLDER_PREFIX: Final = "accelerate_replicas_"
_LONGEST_SOCKET_PATH: Final = 100
#: The free bytes in shared memory from which on ranks exchange gradients there, instead of in temporary files.
_MEMORY_FOLDER: Final = Path("/dev/shm")
_ENOUGH_BYTES: Final = 1 << 30
_UNEVEN: Final = (
    "update: the script counts something that a process in the place of a lost one counts from 0. Begin its loop with "
    "`for epoch in range(loader.iteration, ...)`, and count steps in an object that is registered for checkpointing."
)
_ONE_PROCESS: Final = (
    "under --keep_replicas each rank makes one Accelerator in one process. Start programs from a rank by `accelerate "
    "launch --num_processes 1`"
)


@final
class _Connection:
    """The connection of one process: its rank, and the received part of its next line."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket, self.rank, self.pending = opened, -1, b""

    def send(self, message: object) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # it has ended; the supervisor will say so
            return


@final
class ReplicaMembers:
    """The members of one run on this host, and the processes that wait to become members.

    Args:
        size: the number of ranks at the start; all of them are members.
        num_replacements: the maximum number of lost ranks to replace by new processes.
        minimum: with fewer members, the members save and end.

    Attributes:
        ending: why all members have to save and end; empty while they continue. is_preempted: whether a member got a
            notice of preemption.
    """

    def __init__(self, size: int, num_replacements: int, minimum: int = 1) -> None:
        self.size: int = size
        self.num_replacements: int = num_replacements
        self.num_replaced: int = 0
        self.minimum: int = minimum
        self.ending: str = ""
        self.is_preempted: bool = False
        self.members: set[int] = set(range(size))
        self.folder: Path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_choose_place()))
        if len(str(self.folder)) > _LONGEST_SOCKET_PATH - len(REPLICAS_SOCKET_NAME):
            raise LaunchError(f"{self.folder}: the path is too long for a socket. Set TMPDIR to a shorter one.")
        self._connections: dict[int, _Connection] = {}
        self._unknown: list[_Connection] = []
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._waiting: set[int] = set()
        self._starters = set(range(size))  # ranks whose process was started at the beginning
        self._ended: set[int] = set()  # the ones of these that have finished
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self.folder / f"{REPLICAS_SOCKET_NAME}.new"))
        self._listening.listen(128)
        # Listen before the socket gets its final name.
        (self.folder / f"{REPLICAS_SOCKET_NAME}.new").rename(self.folder / REPLICAS_SOCKET_NAME)
        if self.folder.parent == _MEMORY_FOLDER:
            remove_left_folders(_MEMORY_FOLDER)
        self._selector: selectors.BaseSelector | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which ranks find the members and know the minimum."""
        return {REPLICAS_FOLDER_VARIABLE: str(self.folder), REPLICAS_MINIMUM_VARIABLE: str(self.minimum)}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        self._selector = selector
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close all connections, and remove the folder."""
        for connection in (*self._connections.values(), *self._unknown):
            connection.socket.close()
        self._listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- messages ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._selector is not None
        connection = _Connection(self._listening.accept()[0])
        self._unknown.append(connection)
        read: Callable[[], None] = lambda: self._read(connection)  # noqa: E731
        self._selector.register(connection.socket, selectors.EVENT_READ, read)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
            return
        *lines, connection.pending = (connection.pending + data).split(b"\n")
        for line in lines:
            self._handle(connection, json.loads(line))

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        if "operation" not in message:
            if message["rank"] in self._connections:
                connection.send({"error": f"Rank {message['rank']} is another process, which lives: {_ONE_PROCESS}."})
                return
            connection.rank = int(message["rank"])
            self._unknown.remove(connection)
            self._connections[connection.rank] = connection
            return
        if self._connections.get(connection.rank) is not connection:
            return  # of a process that has ended
        if message["operation"] == "join":
            if not self.ending:
                self._waiting.add(connection.rank)
            return
        if notice := message.get("notice"):
            self.is_preempted = True
            self._end(f"preempted by {notice}")
        self._arrived[connection.rank] = (message["operation"], message["value"])
        self._complete()

    def lost(self, rank: int, *, has_failed: bool = True) -> None:
        """Note that the process of ``rank`` has ended; the values it sent before still count."""
        if has_failed:
            self._starters.discard(rank)
        elif rank in self._starters:
            self._ended.add(rank)
        self.members.discard(rank)
        self._waiting.discard(rank)
        if has_failed and len(self.members) < self.minimum:
            living = f"{'only ' if self.members else ''}{some_ranks(self.members)} of {self.size}"
            lives = by_number(self.members, "lives", "live")
            self._end(f"{living} {lives}, fewer than --min_replicas {self.minimum}")
        connection = self._connections.pop(rank, None)
        if connection is not None:
            self._forget(connection)
        states = sorted(self.folder.glob(f"state_{rank}_*"), key=lambda path: path.stat().st_mtime)
        for path in states[:-2]:  # the last two may still be read
            path.unlink(missing_ok=True)
        self._complete()

    def _end(self, why: str) -> None:
        self.ending = self.ending or why
        self._waiting.clear()

    def _forget(self, connection: _Connection) -> None:
        assert self._selector is not None
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
            connection.socket.close()
        if connection in self._unknown:
            self._unknown.remove(connection)
        if self._connections.get(connection.rank) is connection:  # it was registered after its process had ended
            del self._connections[connection.rank]
            self._waiting.discard(connection.rank)

    def _complete(self) -> None:
        """Answer the running exchange once every living member has sent its value."""
        if not self._arrived or not self.members or not self.members <= self._arrived.keys():
            return
        arrived, self._arrived = self._arrived, {}
        operations = {operation for operation, _ in arrived.values()}
        if len(operations) > 1:
            named = "; ".join(f"rank {rank} is in {operation}" for rank, (operation, _) in sorted(arrived.items()))
            self._answer(self.members, {"error": f"The ranks wait for each other in different operations: {named}."})
            return
        if operations == {"update"} and self._ended:
            ended = f"{some_ranks(self._ended)} came to the end"
            others = f"{some_ranks(arrived)} {by_number(arrived, 'makes', 'make')} one more {_UNEVEN}"
            self._answer(self.members, {"error": f"{ended}, and {others}"})
            return
        values = {rank: value for rank, (_, value) in arrived.items()}
        answered = set(self.members)
        if operations == {"admit"} and any(given["path"] for given in values.values()):
            joined = set(self._waiting)
            self.members |= joined
            self._waiting -= joined
            updates = next(given["updates"] for given in values.values())
            paths = {rank: given["path"] for rank, given in values.items()}
            self._answer(joined, self._reply({**paths, -1: updates}))
        self._answer(answered, self._reply(values))

    def _reply(self, values: dict[int, Any]) -> dict[str, Any]:
        members, joining = sorted(self.members), sorted(self._waiting)
        return {"values": values, "members": members, "joining": joining, "ending": self.ending}

    def _answer(self, ranks: set[int], message: dict[str, Any]) -> None:
        for rank in ranks:
            if rank in self._connections:
                self._connections[rank].send(message)

    # -- replacement ---------------------------------------------------------------------------------------

    def replace(self) -> bool:
        """Return whether a lost rank gets a new process, and count the replacement."""
        if not self.members or self.ending or self.num_replaced >= self.num_replacements:
            return False
        self.num_replaced += 1
        return True


def remove_left_folders(place: Path) -> None:
    """Remove this user's folders in ``place``, on this host's own disk, of killed launchers."""
    for folder in place.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            if folder.stat().st_uid != os.getuid():
                continue
            try:
                asking.connect(str(folder / REPLICAS_SOCKET_NAME))
            except ConnectionRefusedError:  # nobody listens any more
                shutil.rmtree(folder, ignore_errors=True)


def _choose_place() -> str | None:
    if _MEMORY_FOLDER.is_dir() and os.access(_MEMORY_FOLDER, os.W_OK):
        room = os.statvfs(_MEMORY_FOLDER)
        if room.f_bavail * room.f_frsize >= _ENOUGH_BYTES:
            return str(_MEMORY_FOLDER)
    return None
