"""The launcher's part of a fault-tolerant run: it decides the membership and answers the members' exchanges.

It needs no torch. Everything runs on the supervisor's thread, so a rank's end is always before or after an exchange.
With several hosts, the launcher of machine 0 decides, and the others' launchers forward what their ranks send.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import shutil
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from ...errors import LaunchError
from ...launch.streams import write_all
from ...wording import by_number, some_ranks
from .connections import REPLICAS_SOCKET_NAME, Clock, HostLink, RankConnections

#: The launcher's folder, with its socket and the files that ranks exchange.
REPLICAS_FOLDER_VARIABLE: Final = "ACCELERATE_REPLICAS_FOLDER"
#: Set in a process that replaces a lost rank.
REPLICA_JOINS_VARIABLE: Final = "ACCELERATE_REPLICA_JOINS"
#: The minimum number of living members; with fewer, they save and end.
REPLICAS_MINIMUM_VARIABLE: Final = "ACCELERATE_REPLICAS_MINIMUM"
#: The number of ranks that hold a copy of the model together.
REPLICA_SIZE_VARIABLE: Final = "ACCELERATE_REPLICA_SIZE"
#: How often the ranks of this replica were started before.
REPLICA_START_VARIABLE: Final = "ACCELERATE_REPLICA_START"
#: The axes along which the ranks of a replica share it out.
REPLICA_AXES: Final = ("pp", "dp_shard", "cp", "tp")
#: Launchers that hear nothing from each other for so long have lost each other; each sends something every second.
SILENCE_SECONDS: Final = 7.0
_FOLDER_PREFIX: Final = "accelerate_replicas_"
_LONGEST_SOCKET_PATH: Final = 100
#: The free bytes in shared memory from which on ranks exchange gradients there, instead of in temporary files.
_MEMORY_FOLDER: Final = Path("/dev/shm")
_ENOUGH_BYTES: Final = 1 << 30
#: What a rank sends before it saves for all, which takes as long as it takes.
BUSY: Final = "busy"
#: What the ranks of a replica send before they form its process group.
MEET: Final = "meet"
#: Operations at the start, before which ranks may load for as long as that takes.
_WITHOUT_LIMIT: Final = ("members", "prepare")
_ALIKE: Final = (
    "All ranks make the same calls in the same order. Look for a `break`, `continue` or `return` that only some ranks "
    "reach."
)
_UNEVEN: Final = (
    "update: the script counts something that a process in the place of a lost one counts from 0. Begin its loop with "
    "`for epoch in range(loader.iteration, ...)`, and count steps in an object that is registered for checkpointing."
)


@final
@dataclass(frozen=True)
class Hosts:
    """The machines of a run, each with ``num_ranks`` ranks; their launchers meet at the address of machine 0.

    ``token`` is the same for all launchers of the run.
    """

    number: int
    machine: int
    num_ranks: int
    address: str
    port: int
    token: str

    def ranks(self, machine: int) -> range:
        """Return the ranks of ``machine``."""
        return range(machine * self.num_ranks, (machine + 1) * self.num_ranks)


class LauncherMembers(ABC):
    """One launcher's part of a run: the connections and files of its host's ranks, and their replacements.

    Args:
        size: the number of ranks at the start, on all hosts; all of them are members.
        num_replacements: the maximum number of this host's lost replicas to replace by new processes.
        minimum: with fewer replicas, the members save and end.
        replica_size: the number of ranks that hold a copy of the model together, and are lost together.

    Attributes:
        members: the living ranks, as far as this launcher knows. ending: why all members have to save and end; empty
            while they continue. is_preempted: whether a member got a notice of preemption. joins: whether this host's
            first processes join a run that has begun already. given_up: this host's ranks that were ended because no
            member is left that they could join. has_finished: whether ranks of another host have come to the end.
    """

    joins: bool = False
    given_up: Collection[int] = ()
    has_finished: bool = False

    def __init__(self, size: int, num_replacements: int, minimum: int = 1, replica_size: int = 1) -> None:
        self.size: int = size
        self.replica_size: int = replica_size
        self._starts: dict[int, int] = {}  # how often each replica was lost; the same on all hosts
        self._started: dict[int, int] = {}  # the same when the newest process of a rank was started
        self._replaced: dict[int, int] = {}  # the same when a replacement of the replica was last counted
        self.num_replacements: int = num_replacements
        self.num_replaced: int = 0
        self.minimum: int = minimum
        self.ending: str = ""
        self.is_preempted: bool = False
        self.members: set[int] = set(range(size))
        self.folder: Path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_choose_place()))
        if len(str(self.folder)) > _LONGEST_SOCKET_PATH - len(REPLICAS_SOCKET_NAME):
            raise LaunchError(f"{self.folder}: the path is too long for a socket. Set TMPDIR to a shorter one.")
        self._ranks = RankConnections(self.folder, self._receive, self._leave, self._is_current)
        if self.folder.parent == _MEMORY_FOLDER:
            remove_left_folders(_MEMORY_FOLDER)
        self._clock: Clock | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which ranks find the members and know the minimum."""
        own = {REPLICAS_FOLDER_VARIABLE: str(self.folder), REPLICAS_MINIMUM_VARIABLE: str(self.minimum)}
        return own | {REPLICA_SIZE_VARIABLE: str(self.replica_size)}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        self._ranks.register(selector)
        if self._clock is not None:
            self._clock.register(selector, self._tick)

    def close(self) -> None:
        """Close all connections, and remove the folder."""
        self._ranks.close()
        if self._clock is not None:
            self._clock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def replace(self, rank: int) -> dict[str, str] | None:
        """Return the variables of a new process for a lost rank, and count its replica's replacement; or None."""
        replica, start = rank // self.replica_size, self._start_of(rank)
        if not self.members or self.ending:
            return None
        if self._replaced.get(replica, 0) < start:  # the first of its replica that is replaced
            if self.num_replaced >= self.num_replacements:
                return None
            self.num_replaced += 1
            self._replaced[replica] = start
        self._started[rank] = start
        return {REPLICA_JOINS_VARIABLE: "1", **self.variables_of(rank)}

    def variables_of(self, rank: int) -> dict[str, str]:
        """Return the environment variables of the newest process of ``rank`` alone."""
        return {REPLICA_START_VARIABLE: str(self._started.get(rank, 0))}

    def replica_of(self, rank: int) -> range:
        """Return the ranks of the replica to which ``rank`` belongs."""
        first = rank - rank % self.replica_size
        return range(first, first + self.replica_size)

    def _is_current(self, rank: int, start: int) -> bool:
        """Return whether a process of ``rank`` that connects belongs to the newest start of its replica."""
        return start >= self._start_of(rank)

    def _start_of(self, rank: int) -> int:
        """Return how often the replica of ``rank`` was lost."""
        return self._starts.get(rank // self.replica_size, 0)

    def _end_replica(self, rank: int, start: int) -> None:
        """Kill this host's ranks of the replica of ``rank``, which was lost for the ``start``-th time."""
        if start > self._start_of(rank):
            self._starts[rank // self.replica_size] = start
            for other in self.replica_of(rank):
                self._ranks.kill(other)
                self._ranks.forget(other)

    def _give_up(self) -> None:
        """End this host's processes, which have nobody left to join."""
        self.given_up = {*self.given_up, *self._ranks.connected}
        self._ranks.kill_all()

    def is_ended(self, rank: int) -> bool:
        """Return whether the newest process of ``rank`` was ended because its replica was lost."""
        return self._started.get(rank, 0) < self._start_of(rank)

    def wait_for_hosts(self) -> None:
        """Wait until the ranks of the other hosts have ended, if they need this launcher."""

    @abstractmethod
    def lost(self, rank: int, *, has_failed: bool = True) -> None:
        """Note that the process of ``rank`` has ended; the values it sent before still count."""

    @abstractmethod
    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank of this host."""

    @abstractmethod
    def _leave(self, rank: int) -> None:
        """Handle the end of a connection of a rank of this host."""

    @abstractmethod
    def _tick(self) -> None:
        """Do what is due every second."""

    def _remove_old_states(self, rank: int) -> None:
        states = sorted(self.folder.glob(f"state_{rank}_*"), key=lambda path: path.stat().st_mtime)
        for path in states[:-2]:  # the last two may still be read
            path.unlink(missing_ok=True)


@final
class ReplicaMembers(LauncherMembers):
    """The members of one run, and the processes that wait to become members.

    Args:
        lost_after_seconds: kill a rank that hasn't answered an exchange for so long after all others; 0: never.
        hosts: the machines of the run, of which this is machine 0; None if there is one.
    """

    def __init__(
        self,
        size: int,
        num_replacements: int,
        minimum: int = 1,
        replica_size: int = 1,
        *,
        lost_after_seconds: float = 0,
        hosts: Hosts | None = None,
    ) -> None:
        super().__init__(size, num_replacements, minimum, replica_size)
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._arrived_at = 0.0
        self._busy: set[int] = set()
        self._meeting: dict[int, Any] = {}  # what ranks gave that form the process group of their replica
        self._waiting: dict[int, Any] = {}  # rank -> the number of the loader in whose loop it joins; None: any
        self._starters = set(range(size))  # ranks whose process was started at the beginning
        self._finished: set[int] = set()  # ranks whose newest process has ended with code 0
        self._lost_after_seconds = lost_after_seconds
        self._hosts = hosts
        self._links: dict[HostLink, int] = {}  # to machines; -1: it hasn't said which
        self._known_machines: set[int] = set()
        self._selector: selectors.BaseSelector | None = None
        self._listening = None if hosts is None else _listen(hosts.port)
        if hosts is not None or lost_after_seconds:
            self._clock = Clock()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let ``selector`` call this object's functions, which are the data of its keys."""
        super().register(selector)
        self._selector = selector
        if self._listening is not None:
            selector.register(self._listening, selectors.EVENT_READ, self._accept_host)
        for link in self._links:
            link.register(selector)

    def close(self) -> None:
        """Close all connections, and remove the folder."""
        for link in self._links:
            link.close()
        if self._listening is not None:
            self._listening.close()
        super().close()

    # -- messages ------------------------------------------------------------------------------------------

    def _receive(self, rank: int, message: dict[str, Any], link: HostLink | None = None) -> None:
        if file := message.get("file"):
            for other in self._greeted():
                if other is not link:
                    other.send({}, file)
        if not self.members and link is None:
            self._give_up()
            return
        if message["operation"] == MEET:
            self._meeting[rank] = message["value"]
            if self._meeting.keys() >= {*self.replica_of(rank)}:
                values = {other: self._meeting.pop(other) for other in self.replica_of(rank)}
                self._answer({*values}, self._reply(values))
            return
        if message["operation"] == "join":
            if not self.ending:
                self._waiting[rank] = message["value"]
                self._arrived_at = time.monotonic()
            return
        if rank not in self.members:  # its replica was lost before this arrived
            return
        if message["operation"] == BUSY:
            self._busy.add(rank)
            return
        self._busy.discard(rank)
        if notice := message.get("notice"):
            self.is_preempted = True
            self._end(f"preempted by {notice}")
        self._arrived[rank] = (message["operation"], message["value"])
        self._arrived_at = time.monotonic()
        self._complete()

    def _leave(self, rank: int) -> None:
        self._waiting.pop(rank, None)

    def lost(self, rank: int, *, has_failed: bool = True) -> None:
        """Note that the process of ``rank`` has ended; the values it sent before still count."""
        self._ranks.forget(rank)
        self._remove_old_states(rank)
        self._lose(rank, self._started.get(rank, 0), has_failed=has_failed)

    def _lose(self, rank: int, start: int, *, has_failed: bool = True) -> None:
        """Note the end of a process of ``rank`` that was started when its replica had been lost ``start`` times."""
        if start < self._start_of(rank):
            return  # it was killed because its replica is lost
        gone = self.replica_of(rank) if has_failed else (rank,)
        was_member = not self.members.isdisjoint(gone)
        self.members.difference_update(gone)
        self._forget_waiting(gone)
        self._busy.difference_update(gone)
        if has_failed:
            self._starters.difference_update(gone)
            self._finished.difference_update(gone)
            self._end_replica(rank, start + 1)
            for link in self._greeted():
                link.send({"lost": rank, "start": start + 1})
        else:
            self._finished.add(rank)
            self.has_finished |= self._hosts is not None and rank not in self._hosts.ranks(0)
        if has_failed and was_member and len(self.members) < self.minimum * self.replica_size:
            living = f"{'only ' if self.members else ''}{some_ranks(self.members)} of {self.size}"
            lives = by_number(self.members, "lives", "live")
            self._end(f"{living} {lives}, fewer than --min_replicas {self.minimum}")
        if not self.members:
            self._give_up()
            for link in self._greeted() if self._finished else ():
                link.send({"over": True})
        self._complete()

    def _end(self, why: str) -> None:
        self.ending = self.ending or why
        self._waiting.clear()

    def _complete(self) -> None:
        """Answer the running exchange once every living member has sent its value."""
        if not self._arrived or not self.members or not self.members <= self._arrived.keys():
            return
        arrived, self._arrived, self._arrived_at = self._arrived, {}, time.monotonic()
        operations = {operation for operation, _ in arrived.values()}
        if len(operations) > 1:
            named = "; ".join(f"rank {rank} is in {operation}" for rank, (operation, _) in sorted(arrived.items()))
            self._answer(
                self.members, {"error": f"The ranks wait for each other in different operations: {named}. {_ALIKE}"}
            )
            return
        if operations == {"update"} and (finished := self._finished & self._starters):
            ended = f"{some_ranks(finished)} came to the end"
            others = f"{some_ranks(arrived)} {by_number(arrived, 'makes', 'make')} one more {_UNEVEN}"
            self._answer(self.members, {"error": f"{ended}, and {others}"})
            return
        # Of a lost replica, what all of its ranks have sent counts.
        whole = {rank for rank in arrived if rank in self.members or arrived.keys() >= {*self.replica_of(rank)}}
        values = {rank: value for rank, (_, value) in arrived.items() if rank in whole}
        answered = set(self.members)
        if operations == {"admit"} and any(given["path"] for given in values.values()):
            joined = set(self._joining())
            self.members |= joined
            self._forget_waiting(joined)
            updates = next(given["updates"] for given in values.values())
            paths = {rank: given["path"] for rank, given in values.items()}
            self._answer(joined, self._reply({**paths, -1: updates}))
        self._answer(answered, self._reply(values))

    def _reply(self, values: dict[int, Any]) -> dict[str, Any]:
        members, joining = sorted(self.members), self._joining()
        awaited = sorted({self._waiting[rank] for rank in joining} - {None})
        return {"values": values, "members": members, "joining": joining, "awaited": awaited, "ending": self.ending}

    def _forget_waiting(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._waiting.pop(rank, None)
            self._meeting.pop(rank, None)

    def _joining(self) -> list[int]:
        """Return the waiting ranks of replicas of which all ranks wait."""
        return sorted(rank for rank in self._waiting if self._waiting.keys() >= {*self.replica_of(rank)})

    def _answer(self, ranks: set[int], message: dict[str, Any]) -> None:
        self._ranks.send(ranks, message)
        for link in self._greeted():
            if there := sorted(ranks.intersection(self._ranks_of(self._links[link]))):
                link.send({"to": there, "message": message})

    # -- time ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for link in self._greeted():
            link.send({})
        for link in [*self._links]:
            link.run()  # this launcher may not have read for a while either
            if link in self._links and now - link.heard_at > SILENCE_SECONDS:
                self._lose_host(link, f"nothing was heard from it for {SILENCE_SECONDS:.0f} s")
        late = self.members - self._arrived.keys() - self._busy
        operations = {operation for operation, _ in self._arrived.values()}
        operations = operations or ({"the beginning of their loop"} if self._joining() else operations)
        is_limited = self._lost_after_seconds and operations and operations.isdisjoint(_WITHOUT_LIMIT)
        if is_limited and late and now - self._arrived_at > self._lost_after_seconds:
            self._arrived_at = now
            say(
                f"{some_ranks(late)} {by_number(late, 'has', 'have')} not answered for {self._lost_after_seconds:g} s, "
                f"and the others wait in {' and '.join(operations)}: {by_number(late, 'it is', 'they are')} killed."
            )
            for rank in late:
                self._ranks.kill(rank)
            for link in self._greeted():
                link.send({"kill": sorted(late)})

    # -- other hosts ---------------------------------------------------------------------------------------

    def _greeted(self) -> list[HostLink]:
        return [link for link, machine in self._links.items() if machine >= 0]

    def _ranks_of(self, machine: int) -> range:
        assert self._hosts is not None, "only then there are links"
        return self._hosts.ranks(machine)

    def _accept_host(self) -> None:
        assert self._listening is not None and self._selector is not None
        opened, _ = self._listening.accept()
        link = HostLink(
            opened,
            self.folder,
            lambda message: self._receive_from(link, message),
            lambda why: self._lose_host(link, why),
        )
        self._links[link] = -1
        link.register(self._selector)

    def _greet(self, link: HostLink, message: dict[str, Any]) -> None:
        """Answer the first message of a launcher: the number of its machine."""
        assert self._hosts is not None
        machine: Any = message.get("machine")
        error = ""
        if not hmac.compare_digest(str(message.get("token")).encode(), self._hosts.token.encode()):
            error = "it belongs to another run, or was given other arguments than machine 0"
        elif machine not in range(1, self._hosts.number):
            error = f"there is no machine {machine} among {self._hosts.number}"
        joins = machine in self._known_machines
        # The end of the launcher before it isn't known yet, or the run ends, and may be started again.
        again = machine in self._links.values() or (joins and bool(self.ending or not self.members))
        here = {"members": sorted(self.members), "starts": [*self._starts.items()]}
        link.send({"error": error, "again": again, "joins": joins, **here})
        if error or again:
            return
        self._links[link], link.takes_files = machine, True
        self._known_machines.add(machine)
        for operation, value in self._arrived.values():
            if operation == "admit" and value["path"]:  # its ranks may be among those who join with this state
                link.send({}, value["path"])

    def _receive_from(self, link: HostLink, message: dict[str, Any]) -> None:
        machine = self._links[link]
        if machine < 0:
            if message:
                self._greet(link, message)
        elif message.get("rank") in self._ranks_of(machine):
            rank, start = message["rank"], message["start"]
            if start < self._start_of(rank):
                return  # its replica was lost before this arrived
            if "message" in message:
                self._receive(rank, message["message"], link)
                self._remove_old_states(rank)
            elif "failed" in message:
                self._lose(rank, start, has_failed=message["failed"])
                self._remove_old_states(rank)
            else:
                self._leave(rank)

    def _lose_host(self, link: HostLink, why: str) -> None:
        machine = self._links.pop(link)
        link.close()
        there = self._ranks_of(machine) if machine >= 0 else range(0)
        lost = sorted((self.members | self._waiting.keys()).intersection(there))
        for first in sorted({self.replica_of(rank)[0] for rank in there if rank not in self._finished}):
            self._lose(first, self._start_of(first))
        if lost:
            outlook = f"The run continues with {some_ranks(self.members)}." if self.members else "No rank is left."
            say(f"machine {machine} was lost with {some_ranks(lost)} ({why}). {self.ending or outlook}")

    def wait_for_hosts(self) -> None:
        """Keep the membership until the ranks of the other hosts have ended."""
        with selectors.DefaultSelector() as selector:
            self.register(selector)
            while self.members and self._greeted():
                for key, _ in selector.select():
                    key.data()


def _listen(port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)


def say(text: str) -> None:
    """Print a line of the launcher."""
    write_all(2, f"accelerate launch: {text}\n".encode())


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
