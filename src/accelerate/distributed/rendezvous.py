"""Rendezvous: the processes of a run find each other through a store and form one process group.

The ranks agree on a prefix in the store for each world, so they never read addresses of an earlier attempt.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from ..errors import WorldError
from ..settings.env import read
from ..torch_private.distributed import FileStore, PrefixStore, Store, TCPStore, default_store, tcp_store
from ..versions import is_torch_version
from ..wording import by_number, some_ranks
from .environment import ProcessIdentity
from .store_requests import RequestThread, WaitingConnections, connection_delay, read_present

#: How long to wait for the other processes, unless a timeout is given.
RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=10)
#: How long the first ranks in a process group wait for the last one.
_FORMED_LIMIT: Final = timedelta(seconds=10)
#: How long a host name may stay unknown: the address of a pod is published only after it has started.
_LOOKUP_SECONDS: Final = 60.0
_LOOKUP_PAUSE_SECONDS: Final = 1.0

#: One each for requests, the program's waits, the hang watch, and background saves.
_CONNECTIONS_PER_RANK: Final = 4
#: The first torch whose store accepts a listening socket.
_TAKES_LISTENER: Final = "2.8"
#: The same as torch's own backlog.
_LISTEN_BACKLOG: Final = 2048
#: A first connection that takes longer has probably waited for a name server.
_SLOW_NAME_SECONDS: Final = 1.0

logger: logging.Logger = logging.getLogger(__name__)
#: Stores that this process serves to others: they outlive the world, because a slower rank may still be reading.
_served_stores: list[Store] = []


def form_group(
    identity: ProcessIdentity,
    backend: str,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    device_id: torch.device | None = None,
    **options: Any,
) -> Store:
    """Initialise torch's default process group, and return a store that belongs to this world alone.

    Raises:
        WorldError: the others can't be reached, don't come, or disagree about the world.
    """
    wait_limit = timeout or RENDEZVOUS_TIMEOUT
    shared = options.pop("store", None) or _rendezvous_store(identity, init_method, wait_limit)
    try:
        store = PrefixStore(agree_on_name(shared, identity, wait_limit), shared)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=identity.rank,
            world_size=identity.size,
            **({} if timeout is None else {"timeout": timeout}),
            **({} if device_id is None else {"device_id": device_id}),
            **options,
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, WorldError):
            raise
        raise WorldError(
            f"The process group of {identity.size} processes with backend {backend!r} couldn't be made: {error} "
            f"(this is rank {identity.rank}; they meet at {init_method or f'{identity.address}:{identity.port}'})."
        ) from error
    # If a rank connected and ended at once, gloo would fail in the ranks that are still connecting to it.
    with contextlib.suppress(RuntimeError):  # one of them failed, or rank 0 did: the next call finds out
        if store.add("num_formed", 1) == identity.size:
            store.set("all_formed", "")
        store.wait(["all_formed"], min(wait_limit, _FORMED_LIMIT))
    return PrefixStore("coordinator", store)


def store_of_group(generation: int) -> Store:
    """Return a store that belongs to this world alone, on top of the process group's store."""
    return PrefixStore(f"accelerate/world_{generation}", default_store())


def serves(store: Store, rank: int) -> bool:
    """Return whether this process (``rank``) serves ``store`` to the others, so the store ends with it."""
    return rank == 0 and not _is_served_by_agent() and tcp_store(store) is not None


def _is_served_by_agent() -> bool:
    return read("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _rendezvous_store(identity: ProcessIdentity, init_method: str | None, wait_limit: timedelta) -> Store:
    url = urlparse(init_method or "env://")
    if url.scheme == "file":
        path = Path(url.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileStore(str(path), identity.size)
    if url.scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise WorldError(f"init_method={init_method!r} needs a host and a port, such as tcp://10.0.0.1:29500.")
        return _tcp_store(
            replace(identity, address=url.hostname, port=url.port), wait_limit, f"init_method={init_method!r}"
        )
    if url.scheme != "env":
        raise WorldError(f"init_method={init_method!r}: known are env://, tcp://HOST:PORT and file:///PATH.")
    return _tcp_store(
        identity, wait_limit, f"MASTER_ADDR={identity.address}, MASTER_PORT={identity.port}, from {identity.name}"
    )


def _tcp_store(identity: ProcessIdentity, wait_limit: timedelta, source: str) -> Store:
    keeps_store = identity.rank == 0 and not _is_served_by_agent()
    if keeps_store:
        _allow_connections(identity.size)
    else:
        _resolve_address(identity, wait_limit, source)
        time.sleep(connection_delay(identity.rank, identity.size))
    notice = threading.Timer(NOTICE_SECONDS, _log_connecting, (identity, source, wait_limit))
    notice.daemon = True
    if _speaks(identity):
        notice.start()
    begin = time.monotonic()
    try:
        store = TCPStore(
            identity.address,
            identity.port,
            is_master=keeps_store,
            timeout=wait_limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen_on_ipv4(identity) if keeps_store else None,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(_unreachable(identity, wait_limit, source, keeps_store, error)) from error
    finally:
        notice.cancel()
    if keeps_store:
        _served_stores.append(store)
        if time.monotonic() - begin > _SLOW_NAME_SECONDS:  # it has connected to itself
            _warn_of_slow_names(identity)
    return store


def _listen_on_ipv4(identity: ProcessIdentity) -> int | None:
    """Return the file descriptor of a socket that listens on IPv4, or None to let torch listen.

    torch listens on IPv6 for IPv4 clients too, and sees them as ::ffff:127.0.0.1, which no /etc/hosts names. So its
    server would ask the name server for the host of each connection in turn, and serve nobody meanwhile.
    """
    if os.name != "posix" or identity.port == 0 or not is_torch_version(">=", _TAKES_LISTENER):
        return None
    try:
        ipaddress.IPv4Address(identity.address)
    except ValueError:
        return None  # a name may be an IPv6 address for another host
    listener = socket.socket(socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", identity.port))
        listener.listen(_LISTEN_BACKLOG)
    except OSError:  # in use: by a store of this process, which torch shares; else torch raises
        listener.close()
        return None
    return listener.detach()


def _warn_of_slow_names(identity: ProcessIdentity) -> None:
    """Warn if the name server is slow, because every connection to the store waits for it."""
    seconds, address = time_name_lookup(identity.address)
    if seconds > _SLOW_NAME_SECONDS:
        logger.warning(
            "The name server took %.0f s to answer. torch looks up the host name of every connection between the ranks "
            "and rank 0, up to %d for each of %d ranks, so the start and the first operations take long. "
            'Name every host of the run in /etc/hosts ("%s %s" for this one), or correct /etc/resolv.conf.',
            seconds,
            _CONNECTIONS_PER_RANK,
            identity.size,
            address,
            socket.gethostname(),
        )


def time_name_lookup(address: str) -> tuple[float, str]:
    """Return the seconds that the look-up of the host name of ``address`` takes, and the IPv6 address looked up."""
    mapped, begin = "", time.monotonic()
    with contextlib.suppress(OSError):  # no IPv6 here, or no answer at all
        found = socket.getaddrinfo(address, 0, socket.AF_INET6, socket.SOCK_STREAM, 0, socket.AI_V4MAPPED)
        mapped, begin = str(found[0][4][0]), time.monotonic()
        socket.getnameinfo((mapped, 0, 0, 0), socket.NI_NUMERICSERV)
    return time.monotonic() - begin, mapped


def _allow_connections(size: int) -> None:
    """Raise this process's limit of open files to fit the connections of all ranks, up to the hard limit."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _CONNECTIONS_PER_RANK * size + 1024
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < _CONNECTIONS_PER_RANK * size:
        logger.warning(
            "Rank 0 serves %d ranks with up to %d connections each, but may open %d files (ulimit -n). Raise the hard "
            "limit of its host, or let a launcher's agent serve them (torchrun).",
            size,
            _CONNECTIONS_PER_RANK,
            allowed,
        )


def _speaks(identity: ProcessIdentity) -> bool:
    """Return whether this process reports a missing rank 0 for its host: the first process other than rank 0."""
    return identity.local_rank == (1 if identity.rank == identity.local_rank else 0)


def _log_connecting(identity: ProcessIdentity, source: str, wait_limit: timedelta) -> None:
    logger.warning(
        "Rank %d waits for rank 0 at %s:%d (%s), which doesn't answer yet. It gives up %.0f s after its start.",
        identity.rank,
        identity.address,
        identity.port,
        source,
        wait_limit.total_seconds(),
    )


def _resolve_address(identity: ProcessIdentity, wait_limit: timedelta, source: str) -> None:
    """Resolve rank 0's address and log delays; torch would retry for the whole timeout without a log line.

    Raises:
        WorldError: it can't be resolved in time.
    """
    start = time.monotonic()
    limit = min(_LOOKUP_SECONDS, wait_limit.total_seconds())
    has_logged = False
    while True:
        try:
            socket.getaddrinfo(identity.address, identity.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() - start > limit:
                raise WorldError(
                    f"The address of rank 0, {identity.address!r}, is not known on this host ({source}): {error}. "
                    "Check its spelling, or give the number of the address."
                ) from error
            if not has_logged:
                logger.warning(
                    "%r is not known on this host yet (%s); asking for %.0f s.", identity.address, error, limit
                )
                has_logged = True
            time.sleep(min(_LOOKUP_PAUSE_SECONDS, limit))


def _unreachable(
    identity: ProcessIdentity, wait_limit: timedelta, source: str, keeps_store: bool, error: Exception
) -> str:
    text = str(error)
    if keeps_store and ("EADDRINUSE" in text or "address already in use" in text.lower()):
        return (
            f"Port {identity.port} of this host is in use by another program, or by another rank 0 "
            f"({source}). Choose another with MASTER_PORT, "
            "`accelerate launch --main_process_port N` or `torchrun --master_port N` (0: any free one), "
            "or end the program that holds it."
        )
    if keeps_store:
        return f"Rank 0 couldn't listen at {identity.address}:{identity.port} ({source}): {error}"
    return (
        f"Rank {identity.rank} of {identity.size} reached nobody at {identity.address}:{identity.port} within "
        f"{wait_limit.total_seconds():.0f} s ({source}). Check that rank 0 runs, the address is rank 0's host as seen "
        f"from here, and no firewall closes the port. torch says: {error}"
    )


# -- the rendezvous ----------------------------------------------------------------------------------------
#
# A store may outlive the processes that wrote to it: an elastic launcher keeps it across restarts, and hosts may count
# restarts differently. So the ranks never trust values that are in the store already. Each rank 0 opens a world with
# the next unused number. Processes enter it until rank 0 closes it. A process that finds a closed world, of an earlier
# attempt, waits for the next one. Only a live rank 0 closes a world, and then publishes the verdict.

#: How often rank 0 checks for errors; the pause grows from the first to the longest.
_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 15.0
#: After this long a wait, the log names the missing ranks.
NOTICE_SECONDS: Final = 15.0
#: How long rank 0 stays after a failure, so that the others can read the reason from its store.
_READING_SECONDS: Final = 2.0
#: How long after its own deadline a process still waits for the verdict: rank 0 has the same deadline.
_LAST_WORDS_SECONDS: Final = 0.5
#: A new rank 0 wakes the processes that wait in so many earlier worlds: the rank 0 of each may have died at any moment.
_NUM_OLDER: Final = 8
_CLOSED: Final = 1 << 40  # added to the member count of a closed world
_WELL: Final = "all are here"


@final
@dataclass(frozen=True)
class _Member:
    rank: int
    size: int
    who: str  # host and process, for messages


def agree_on_name(store: Store, identity: ProcessIdentity, wait_limit: timedelta) -> str:
    """Agree with all ranks on the world to form now, and return its name.

    Raises:
        WorldError: a rank doesn't come in time, two processes have one rank, or sizes differ.
    """
    deadline = time.monotonic() + wait_limit.total_seconds()
    if identity.rank == 0:
        name, verdict = _OwnWorld(store, identity, deadline).form()
    else:
        name, verdict = _join(store, identity, deadline)
    if verdict:
        raise WorldError(f"The world of {identity.size} processes (rank {identity.rank} here) can't form: {verdict}.")
    return name


def _process_here() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _join(store: Store, identity: ProcessIdentity, deadline: float) -> tuple[str, str]:
    """Enter rank 0's world; return its name and an error text (or "")."""
    start, has_entered = time.monotonic(), False
    thread = RequestThread("accelerate rendezvous")
    number = store.add("num_worlds", 0)
    while True:
        is_member = number > 0 and _enter(store, identity, number)
        has_entered = has_entered or is_member
        key = f"world_{number}/verdict" if is_member else f"world_{number + 1}/open"
        found = _wait_for(store, thread, key, identity, deadline, speaks=not has_entered)
        if found is None:
            thread.stop()
            what = "to report that all are here" if has_entered else "to admit it"
            return "", f"rank {identity.rank} waited {deadline - start:.0f} s for rank 0 {what}"
        if is_member and found != _SUPERSEDED:
            thread.stop()
            if found != _WELL:
                store.add(f"world_{number}/readers", 1)
            return f"world_{number}", "" if found == _WELL else found
        number = store.add("num_worlds", 0)


def _enter(store: Store, identity: ProcessIdentity, number: int) -> bool:
    """Enter a world; return False if it is closed."""
    place = store.add(f"world_{number}/num_members", 1)
    if place > _CLOSED:
        return False
    store.set(f"world_{number}/member/{place}", json.dumps([identity.rank, identity.size, _process_here()]))
    return True


def _wait_for(
    store: Store, thread: RequestThread, key: str, identity: ProcessIdentity, deadline: float, *, speaks: bool
) -> str | None:
    """Return the value of `key` once it is set; None after the deadline."""
    notice = _WaitNotice(deadline)
    limit = timedelta(seconds=max(0.0, deadline - time.monotonic()) + _LAST_WORDS_SECONDS)

    def read() -> bytes:
        store.wait([key], limit)  # has a limit: a thread that still waits at interpreter exit would abort the process
        return store.get(key)

    pending = thread.start(read)
    while not pending.is_done(max(0.0, min(NOTICE_SECONDS / 4, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            with contextlib.suppress(RuntimeError):  # torch's timeout
                if pending.is_done(_LAST_WORDS_SECONDS + _READING_SECONDS):  # unless the store doesn't respond
                    return pending.response().decode()
            return None
        if speaks and _speaks(identity) and notice.is_due():  # rank 0 logs for the ranks that have entered
            notice.log(f"rank {identity.rank}", identity.local_size - 1, "rank 0", where=" of its host")
    return pending.response().decode()


#: The verdict of a world that a newer rank 0 has replaced.
_SUPERSEDED: Final = "superseded"


@final
class _OwnWorld:
    """The world that this process, rank 0, opens for the others."""

    def __init__(self, store: Store, identity: ProcessIdentity, deadline: float) -> None:
        self._store, self._identity, self._deadline = store, identity, deadline
        self._waits = WaitingConnections(store)
        self._number = store.add("num_worlds", 1)
        self._name = f"world_{self._number}"
        store.set(f"{self._name}/open", _process_here())
        for older in range(max(1, self._number - _NUM_OLDER), self._number):  # processes that wait for these come here
            store.compare_set(f"world_{older}/open", "", "a process that has ended")
            store.compare_set(f"world_{older}/verdict", "", _SUPERSEDED)

    def form(self) -> tuple[str, str]:
        """Wait for all ranks, publish the verdict, and return the world's name and an error text (or "")."""
        wrong = self._wait_until_full()
        num_members = self._store.add(f"{self._name}/num_members", _CLOSED) - _CLOSED
        if not wrong:
            members = self._members(num_members, waits=True)
            wrong = self._find_wrong(members) or self._find_missing(members)
        published = self._store.compare_set(f"{self._name}/verdict", "", wrong or _WELL).decode()
        if published == _SUPERSEDED:
            wrong = self._newer() or wrong
        if wrong:
            until = time.monotonic() + _READING_SECONDS
            while self._store.add(f"{self._name}/readers", 0) < num_members and time.monotonic() < until:
                time.sleep(0.05)
        self._waits.close()
        return self._name, wrong

    def _wait_until_full(self) -> str:
        """Wait until the world is full or the deadline has passed; return the error found meanwhile, or ""."""
        if self._identity.size == 1:
            return ""
        pause, notice = _FIRST_PAUSE_SECONDS, _WaitNotice(self._deadline)
        with self._waits.start(f"{self._name}/member/{self._identity.size - 1}") as wait:
            while not wait.is_over(max(0.0, min(pause, self._deadline - time.monotonic()))):
                if time.monotonic() >= self._deadline:
                    return ""
                members = self._members(self._store.add(f"{self._name}/num_members", 0))
                if wrong := self._newer() or self._find_wrong(members):
                    return wrong
                if notice.is_due():
                    here = {0, *(member.rank for member in members)}
                    notice.log("rank 0", len(here) - 1, _missing_ranks(here, self._identity.size))
                pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
            wait.response()
        return ""

    def _members(self, count: int, *, waits: bool = False) -> list[_Member]:
        """Return the processes that have entered; with ``waits``, wait for all ``count`` of them."""
        keys = [f"{self._name}/member/{place}" for place in range(1, count + 1)]
        if waits and keys:
            with self._waits.start(*keys) as wait:
                if wait.is_over(max(1.0, self._deadline - time.monotonic())):
                    return [_Member(*json.loads(text)) for text in wait.response()]
        found = read_present(self._store, keys)
        return [_Member(*json.loads(text)) for text in found.values() if text]

    def _newer(self) -> str:
        if self._store.add("num_worlds", 0) == self._number:
            return ""
        other = self._store.get(f"world_{self._number + 1}/open").decode()
        return f"two processes say that they are rank 0: {_process_here()}, and {other}. {_RANK_HINT}"

    def _find_wrong(self, members: list[_Member]) -> str:
        size, here = self._identity.size, dict[int, _Member]()
        for member in members:
            if member.rank in here:
                both = f"{here[member.rank].who}, and {member.who}"
                return f"two processes say that they are rank {member.rank}: {both}. {_RANK_HINT}"
            if member.size != size:
                return (
                    f"rank 0 expects {size} processes, but rank {member.rank} ({member.who}) expects "
                    f"{member.size}. Give every launcher the same number of machines and processes "
                    "(WORLD_SIZE)"
                )
            here[member.rank] = member
        return ""

    def _find_missing(self, members: list[_Member]) -> str:
        size, here = self._identity.size, {0, *(member.rank for member in members)}
        if len(here) == size:
            return ""
        return (
            f"{_missing_ranks(here, size)} didn't come to {self._identity.address}:{self._identity.port} in "
            f"time. Check that as many processes were started as WORLD_SIZE={size} says, and with this address"
        )


_RANK_HINT: Final = "Each needs its own RANK; check the machine ranks given to the launcher"


@final
class _WaitNotice:
    """The log lines about a wait, at growing intervals."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._start = deadline, time.monotonic()
        self._next_seconds = NOTICE_SECONDS

    def is_due(self) -> bool:
        """Return whether the next line is due."""
        if time.monotonic() - self._start < self._next_seconds:
            return False
        self._next_seconds *= 2
        return True

    def log(self, speaker: str, num_others: int, whom: str, where: str = "") -> None:
        """Log which ranks the speaker and the others wait for."""
        others = f" and {num_others} {by_number(num_others, 'other', 'others')}{where}" if num_others > 0 else ""
        left = max(0.0, self._deadline - time.monotonic())
        verb = "wait" if others else "waits"
        logger.warning("%s%s %s for %s; giving up in %.0f s.", speaker.capitalize(), others, verb, whom, left)


def _missing_ranks(here: Container[int], size: int) -> str:
    absent = [rank for rank in range(size) if rank not in here]
    return f"{some_ranks(absent, 8)} of {size}"
