"""Who is here, before a group is formed: every rank once, all of them alive, all of the same mind about their number.

A store may outlive the processes that wrote into it: an elastic launcher keeps one over its restarts, and no count of
restarts is the same on all hosts. So nothing that lies in the store is believed. Each process knocks with a fresh
token; rank 0 makes up a fresh name for the world and invites whoever has knocked; only the living accept. What was
left behind by an earlier attempt accepts nothing, and never looks under the new name.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Container
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, final

from ..errors import WorldError

if TYPE_CHECKING:
    from ..clusters import ClusterSeat
    from ..torch_private.distributed import Store

logger = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.01
#: A wait that has lasted this long is worth a word: whoever looks at the terminal learns whom it is for.
WORD_SECONDS: Final = 15.0
#: How long rank 0, which may keep the store and is about to end, lets the others read why the world can't form.
_READING_SECONDS: Final = 2.0


@final
@dataclass(frozen=True)
class _Knock:
    rank: int
    size: int
    token: str
    who: str  # host and process, for messages


def answer(store: Store, seat: ClusterSeat, patience: timedelta) -> str:
    """The name of the world that all ranks have agreed to form now.

    Raises:
        WorldError: a rank doesn't come in time, two processes have one rank, or sizes differ.
    """
    deadline = time.monotonic() + patience.total_seconds()
    me = _Knock(seat.rank, seat.size, uuid.uuid4().hex, f"{socket.gethostname()}, process {os.getpid()}")
    number = store.add("knocks", 1)
    store.set(f"knock/{number}", f"{me.rank}|{me.size}|{me.token}|{me.who}")
    if me.rank == 0:
        name = f"world_{uuid.uuid4().hex[:12]}"
        verdict = _call(store, seat, name, number, deadline)
    else:
        name, verdict = _wait_for_call(store, me, deadline)
    if verdict:
        raise WorldError(f"The world of {seat.size} processes (rank {seat.rank} here) can't form: {verdict}.")
    return name


def _wait_for_call(store: Store, me: _Knock, deadline: float) -> tuple[str, str]:
    """The world that rank 0 has invited to, and its verdict. A newer rank 0 invites again."""
    start, name = time.monotonic(), ""
    word = _Word(me.rank, deadline)
    while time.monotonic() < deadline:
        word.is_due("rank 0, which waits for others" if name else "rank 0")
        if store.check([f"invitation/{me.token}"]):
            invited = store.get(f"invitation/{me.token}").decode()
            if invited != name:
                name = invited
                store.set(f"{name}/accepted/{me.token}", "1")
                store.add(f"{name}/num_accepted", 1)
            if store.check([f"{name}/verdict"]):
                verdict = store.get(f"{name}/verdict").decode()
                store.add(f"{name}/readers", 1)
                return name, verdict
        time.sleep(_POLL_SECONDS)
    what = "to say that all are here" if name else "to invite it"
    return name, f"rank {me.rank} waited {time.monotonic() - start:.0f} s for rank 0 {what}"


def _call(store: Store, seat: ClusterSeat, name: str, mine: int, deadline: float) -> str:
    """Rank 0's part: invites until every rank has accepted; returns, and tells all, what is wrong, if anything."""
    verdict = _collect(store, seat, name, mine, deadline)
    store.set(f"{name}/verdict", verdict)
    if verdict:
        until = time.monotonic() + _READING_SECONDS
        while store.add(f"{name}/readers", 0) < store.add(f"{name}/num_accepted", 0) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    return verdict


def _collect(store: Store, seat: ClusterSeat, name: str, mine: int, deadline: float) -> str:
    me = _read(store, mine)
    open_invitations: list[_Knock] = []
    here: dict[int, _Knock] = {} if me is None else {0: me}
    num_read = 0
    word = _Word(seat.rank, deadline)
    while len(here) < seat.size:
        word.is_due(_absent(here, seat))
        while num_read < store.add("knocks", 0):
            knock = _read(store, num_read + 1)
            if knock is None:
                break  # its number is taken, its text on the way
            num_read += 1
            if knock.rank == 0 and num_read > mine:
                return f"two processes say that they are rank 0: {_who(me)}, and {knock.who}. {_EACH_ITS_OWN}"
            if knock.rank != 0:
                store.set(f"invitation/{knock.token}", name)
                open_invitations.append(knock)
        for knock in [knock for knock in open_invitations if store.check([f"{name}/accepted/{knock.token}"])]:
            open_invitations.remove(knock)
            if knock.rank in here:
                both = f"{here[knock.rank].who}, and {knock.who}"
                return f"two processes say that they are rank {knock.rank}: {both}. {_EACH_ITS_OWN}"
            if knock.size != seat.size:
                return (
                    f"rank 0 was told that there are {seat.size} processes, rank {knock.rank} ({knock.who}) that there "
                    f"are {knock.size}. Give every launcher the same number of machines and processes (WORLD_SIZE)"
                )
            here[knock.rank] = knock
        if time.monotonic() > deadline:
            return (
                f"{_absent(here, seat)} didn't come to {seat.address}:{seat.port} in time. Check that as many "
                f"processes were started as WORLD_SIZE={seat.size} says, and with this address"
            )
        time.sleep(_POLL_SECONDS)
    return ""


_EACH_ITS_OWN: Final = "Each needs its own RANK; check the machine ranks given to the launcher"


@final
class _Word:
    """What is said, after a while and then ever more rarely, about a wait."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.rank, self.deadline, self.start = rank, deadline, time.monotonic()
        self.next_seconds = WORD_SECONDS

    def is_due(self, whom: str) -> None:
        """Where it is time for it, the log says whom this rank waits for."""
        now = time.monotonic()
        if now - self.start < self.next_seconds:
            return
        self.next_seconds *= 2
        left = max(0.0, self.deadline - now)
        logger.warning("Rank %d waits for %s; it will give up in %.0f s.", self.rank, whom, left)


def _absent(here: Container[int], seat: ClusterSeat) -> str:
    absent = [str(rank) for rank in range(seat.size) if rank not in here]
    shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
    return f"rank{'s' if len(absent) > 1 else ''} {shown} of {seat.size}"


def _read(store: Store, number: int) -> _Knock | None:
    if not store.check([f"knock/{number}"]):
        return None
    rank, size, token, who = store.get(f"knock/{number}").decode().split("|", 3)
    return _Knock(int(rank), int(size), token, who)


def _who(knock: _Knock | None) -> str:
    return "this one" if knock is None else knock.who
