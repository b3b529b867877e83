"""A launcher's connections: with the ranks of its host, and with the launchers of other hosts. It needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, final

#: The launcher's socket in the members' folder.
REPLICAS_SOCKET_NAME: Final = "members"
#: Files that launchers send to each other; another name is never written.
_FILE_NAME: Final = re.compile(r"(gradients|state)_[0-9_]+")
_CHUNK_BYTES: Final = 1 << 20
_LONGEST_LINE: Final = 1 << 20
_TICK_SECONDS: Final = 1.0
_FINISH_SECONDS: Final = 10.0
_ONE_PROCESS: Final = (
    "under --keep_replicas each rank makes one Accelerator in one process. Start programs from a rank by `accelerate "
    "launch --num_processes 1`"
)


@final
class _Connection:
    """The connection of one process: its rank and process id, and the received part of its next line."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket, self.rank, self.pid, self.pending = opened, -1, 0, b""

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; the supervisor will say so
            self.socket.sendall(line)


@final
class RankConnections:
    """The connections of the ranks of this host, which send lines of JSON.

    Args:
        folder: the members' folder.
        receive: called with a rank and its message.
        leave: called with a rank whose connection ended, if that process was still known.
        is_current: called with a rank that connects and its replica's start; a process of an earlier start is killed.
    """

    def __init__(
        self,
        folder: Path,
        receive: Callable[[int, dict[str, Any]], None],
        leave: Callable[[int], None],
        is_current: Callable[[int, int], bool],
    ) -> None:
        self._receive, self._leave, self._is_current = receive, leave, is_current
        self._known: dict[int, _Connection] = {}
        self._unknown: list[_Connection] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(folder / f"{REPLICAS_SOCKET_NAME}.new"))
        self._listening.listen(128)
        # Listen before the socket gets its final name.
        (folder / f"{REPLICAS_SOCKET_NAME}.new").rename(folder / REPLICAS_SOCKET_NAME)
        self._selector: selectors.BaseSelector | None = None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        self._selector = selector
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close all connections."""
        for opened in (*self._known.values(), *self._unknown):
            _close(opened.socket, self._selector)
        _close(self._listening, self._selector)

    def send(self, ranks: Iterable[int], message: object) -> None:
        """Send ``message`` to the processes of ``ranks`` that are connected."""
        line = _line(message)
        for rank in ranks:
            if rank in self._known:
                self._known[rank].send(line)

    def kill(self, rank: int) -> None:
        """Kill the process of ``rank``, if it is connected."""
        if rank in self._known and self._known[rank].pid > 0:  # 0 would be this process's own group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._known[rank].pid, signal.SIGKILL)

    @property
    def connected(self) -> list[int]:
        """The ranks whose processes are connected."""
        return [*self._known]

    def kill_all(self) -> None:
        """Kill all connected processes."""
        for rank in self._known:
            self.kill(rank)

    def forget(self, rank: int) -> None:
        """Close the connection of ``rank``, whose process has ended."""
        if rank in self._known:
            _close(self._known.pop(rank).socket, self._selector)

    def _accept(self) -> None:
        assert self._selector is not None
        if self._listening.fileno() < 0:
            return  # closed since the selector found it
        connection = _Connection(self._listening.accept()[0])
        self._unknown.append(connection)
        read: Callable[[], None] = lambda: self._read(connection)  # noqa: E731
        self._selector.register(connection.socket, selectors.EVENT_READ, read)

    def _read(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return  # closed since the selector found it
        try:
            data = connection.socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            _close(connection.socket, self._selector)
            if connection in self._unknown:
                self._unknown.remove(connection)
            if self._known.get(connection.rank) is connection:  # it was registered after its process had ended
                del self._known[connection.rank]
                self._leave(connection.rank)
            return
        *lines, connection.pending = (connection.pending + data).split(b"\n")
        for line in lines:
            self._handle(connection, json.loads(line))

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        if "operation" not in message:
            if message["rank"] in self._known:
                error = f"Rank {message['rank']} is another process, which lives: {_ONE_PROCESS}."
                connection.send(_line({"error": error}))
                return
            connection.rank, connection.pid = int(message["rank"]), int(message.get("pid", 0))
            self._unknown.remove(connection)
            self._known[connection.rank] = connection
            if not self._is_current(connection.rank, int(message.get("start", 0))):  # its replica was lost meanwhile
                self.kill(connection.rank)
                self.forget(connection.rank)  # what it has sent by now counts no more
        elif self._known.get(connection.rank) is connection:  # else its process has ended
            self._receive(connection.rank, message)


@final
class HostLink:
    """The connection of two launchers: lines of JSON, each followed by the content of the file that it names.

    What one side sends arrives in the same order, so a file is there before any later message.

    Args:
        folder: where files are read from and written to.
        receive: called with each message, once its file is there.
        end: called with the reason when the connection has ended.
    """

    def __init__(
        self,
        opened: socket.socket,
        folder: Path,
        receive: Callable[[dict[str, Any]], None],
        end: Callable[[str], None],
    ) -> None:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._folder, self._receive, self._end = opened, folder, receive, end
        self.heard_at: float = time.monotonic()
        self.takes_files: bool = False  # before the other side has shown that it belongs to this run
        self._out: deque[bytes | list[int]] = deque()  # a list: descriptor, offset and number of bytes of a file
        self._pending = b""
        self._file, self._left, self._message = -1, 0, dict[str, Any]()  # the file that arrives
        self._selector: selectors.BaseSelector | None = None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        self._selector = selector
        selector.register(self.socket, self._events(), self.run)

    def close(self) -> None:
        """Close the connection; nothing is called any more."""
        _close(self.socket, self._selector)
        for descriptor in [self._file, *(item[0] for item in self._out if isinstance(item, list))]:
            if descriptor >= 0:
                os.close(descriptor)
        self._file = -1
        self._out.clear()

    def finish(self) -> None:
        """Send what is left, wait until the other side has read it, and close the connection."""
        if self.socket.fileno() >= 0:
            self.socket.settimeout(_FINISH_SECONDS)
            with contextlib.suppress(OSError):
                while self._out:
                    if self._send_some(self._out[0]):
                        self._out.popleft()
                self.socket.shutdown(socket.SHUT_WR)
                while self.socket.recv(_CHUNK_BYTES):
                    pass
        self.close()

    def send(self, message: dict[str, Any], file: str = "") -> None:
        """Send ``message``, and the content of ``file`` in the folder."""
        if self.socket.fileno() < 0:
            return
        content: list[list[int]] = []
        if file:
            descriptor = os.open(self._folder / file, os.O_RDONLY)
            content = [[descriptor, 0, os.fstat(descriptor).st_size]]
            message = {**message, "file": file, "bytes": content[0][2]}
        self._out.extend([_line(message), *content])
        self.run(reads=False)

    def run(self, *, reads: bool = True) -> None:
        """Send and receive as much as is possible without waiting."""
        if self.socket.fileno() < 0:
            return  # closed since the selector found it
        with contextlib.suppress(OSError):  # it has ended, or takes no more now: the selector will say so
            while self._out and self._send_some(self._out[0]):
                self._out.popleft()
        if self._selector is not None:
            self._selector.modify(self.socket, self._events(), self.run)
        if reads:
            try:
                data = self.socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                return self._end(str(error))
            if not data:
                return self._end("the launcher there has ended, or has heard nothing from here")
            self.heard_at = time.monotonic()
            self._take(memoryview(data))

    def _events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def _send_some(self, item: bytes | list[int]) -> bool:
        """Return whether all of ``item`` was sent."""
        if isinstance(item, bytes):
            sent = self.socket.send(item)
            self._out[0] = item[sent:]
            return sent == len(item)
        descriptor, offset, size = item
        sent = os.sendfile(self.socket.fileno(), descriptor, offset, min(size - offset, _CHUNK_BYTES)) if size else 0
        item[1] += sent
        if item[1] == size:
            os.close(descriptor)
        return item[1] == size

    def _take(self, data: memoryview) -> None:
        while data and self.socket.fileno() >= 0:
            if self._left:
                written = os.write(self._file, data[: self._left])
                data, self._left = data[written:], self._left - written
            else:
                line, found, rest = bytes(data).partition(b"\n")
                self._pending += line
                if not found and len(self._pending) < _LONGEST_LINE:
                    return
                data = memoryview(rest)
                try:
                    self._message, self._pending = json.loads(self._pending), b""
                    self._left = int(self._message.get("bytes", 0))
                    if "bytes" in self._message:
                        self._file = self._create(str(self._message["file"]))
                except (ValueError, AttributeError):
                    return self._end("it sends what no launcher sends")
            if not self._left:
                if self._file >= 0:
                    os.close(self._file)
                    self._file = -1
                self._receive(self._message)

    def _create(self, name: str) -> int:
        if not self.takes_files or not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} isn't a file of ranks")
        return os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)  # ranks may have mapped it


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _close(opened: socket.socket, selector: selectors.BaseSelector | None) -> None:
    if selector is not None and opened.fileno() >= 0:
        with contextlib.suppress(KeyError, ValueError):  # it isn't registered, or the selector is closed
            selector.unregister(opened)
    opened.close()


@final
class Clock:
    """A call every second in the launcher's loop."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)

    def register(self, selector: selectors.BaseSelector, tick: Callable[[], None]) -> None:
        """Let ``selector`` call ``tick`` every second."""

        def run() -> None:
            os.read(self._reading, _CHUNK_BYTES)
            tick()

        selector.register(self._reading, selectors.EVENT_READ, run)

    def close(self) -> None:
        """Stop the calls."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        os.close(self._reading)
        os.close(self._writing)

    def _ring(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writing, b".")
