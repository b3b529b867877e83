"""Rendezvous: the processes of a run find each other through a store and form one process group.

Every world has its own prefix in the store, agreed on in the rendezvous: addresses that an earlier attempt left behind
are never read.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Container
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from ..errors import WorldError
from ..settings.env import read
from ..torch_private.distributed import FileStore, PrefixStore, Store, TCPStore, default_store
from .environment import ProcessIdentity

if TYPE_CHECKING:
    from ..torch_private.distributed import Store
    from .environment import ProcessIdentity

#: How long to wait for the other processes, unless a timeout is given.
RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=10)
#: How long a host name may stay unknown: the address of a pod is published only after it has started.
_LOOKUP_SECONDS: Final = 60.0
_LOOKUP_PAUSE_SECONDS: Final = 1.0

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
            f"(this is rank {identity.rank}; they meet at {_address_of(identity, init_method)})."
        ) from error
    return PrefixStore("coordinator", store)


def store_of_group(generation: int) -> Store:
    """Return a store that belongs to this world alone, on top of the one that the process group was made with."""
    return PrefixStore(f"accelerate/world_{generation}", default_store())


def serves(store: Store, rank: int) -> bool:
    """Return whether this process, rank ``rank``, serves ``store`` to the others, so that it ends with this process."""
    if rank != 0 or _is_served_by_agent():
        return False
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


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
    if not keeps_store:
        _resolve_address(identity, wait_limit, source)
    notice = threading.Timer(NOTICE_SECONDS, _log_connecting, (identity, source, wait_limit))
    notice.daemon = True
    notice.start()
    try:
        store = TCPStore(
            identity.address,
            identity.port,
            is_master=keeps_store,
            timeout=wait_limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(_unreachable(identity, wait_limit, source, keeps_store, error)) from error
    finally:
        notice.cancel()
    if keeps_store:
        _served_stores.append(store)
    return store


def _log_connecting(identity: ProcessIdentity, source: str, wait_limit: timedelta) -> None:
    logger.warning(
        "Rank %d waits for rank 0 at %s:%d (%s), where nobody answers yet; it will give up %.0f s after its start.",
        identity.rank,
        identity.address,
        identity.port,
        source,
        wait_limit.total_seconds(),
    )


def _resolve_address(identity: ProcessIdentity, wait_limit: timedelta, source: str) -> None:
    """Resolve the address; torch would retry, without a log line, for the whole timeout.

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
    if keeps_store and _is_in_use(error):
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
        f"{wait_limit.total_seconds():.0f} s ({source}). Check that rank 0 runs, that the address is rank 0's host as "
        f"seen from here, and that no firewall closes the port. torch says: {error}"
    )


def _is_in_use(error: Exception) -> bool:
    text = str(error)
    return "EADDRINUSE" in text or "address already in use" in text.lower()


def _address_of(identity: ProcessIdentity, init_method: str | None) -> str:
    return init_method or f"{identity.address}:{identity.port}"


# -- the rendezvous ----------------------------------------------------------------------------------------
#
# A store may outlive the processes that wrote into it: an elastic launcher keeps one over its restarts, and no count of
# restarts is the same on all hosts. So no value that is in the store already is trusted. Each process sends a join
# request with a fresh token; rank 0 makes up a fresh name for the world and admits whoever has sent one; only running
# processes accept the admission. Processes of an earlier attempt accept none, and never look under the new name.

_POLL_SECONDS: Final = 0.01
#: After so long a wait the log says which ranks are waited for.
NOTICE_SECONDS: Final = 15.0
#: How long rank 0, which may keep the store and is about to end, lets the others read why the world can't form.
_READING_SECONDS: Final = 2.0


@final
@dataclass(frozen=True)
class _JoinRequest:
    rank: int
    size: int
    token: str
    who: str  # host and process, for messages


def agree_on_name(store: Store, identity: ProcessIdentity, wait_limit: timedelta) -> str:
    """Agree with all ranks on the world to form now, and return its name.

    Raises:
        WorldError: a rank doesn't come in time, two processes have one rank, or sizes differ.
    """
    deadline = time.monotonic() + wait_limit.total_seconds()
    me = _JoinRequest(identity.rank, identity.size, uuid.uuid4().hex, f"{socket.gethostname()}, process {os.getpid()}")
    number = store.add("num_join_requests", 1)
    store.set(f"join_request/{number}", f"{me.rank}|{me.size}|{me.token}|{me.who}")
    if me.rank == 0:
        name = f"world_{uuid.uuid4().hex[:12]}"
        verdict = _admit_all(store, identity, name, number, deadline)
    else:
        name, verdict = _wait_for_admission(store, me, deadline)
    if verdict:
        raise WorldError(f"The world of {identity.size} processes (rank {identity.rank} here) can't form: {verdict}.")
    return name


def _wait_for_admission(store: Store, me: _JoinRequest, deadline: float) -> tuple[str, str]:
    """Return the name of the world that rank 0 admits to, and its verdict. A newer rank 0 admits again."""
    start, name = time.monotonic(), ""
    notice = _WaitNotice(me.rank, deadline)
    while time.monotonic() < deadline:
        notice.log_when_due("rank 0, which waits for others" if name else "rank 0")
        if store.check([f"admission/{me.token}"]):
            admitted_to = store.get(f"admission/{me.token}").decode()
            if admitted_to != name:
                name = admitted_to
                store.set(f"{name}/accepted/{me.token}", "1")
                store.add(f"{name}/num_accepted", 1)
            if store.check([f"{name}/verdict"]):
                verdict = store.get(f"{name}/verdict").decode()
                store.add(f"{name}/readers", 1)
                return name, verdict
        time.sleep(_POLL_SECONDS)
    what = "to report that all are here" if name else "to admit it"
    return name, f"rank {me.rank} waited {time.monotonic() - start:.0f} s for rank 0 {what}"


def _admit_all(store: Store, identity: ProcessIdentity, name: str, mine: int, deadline: float) -> str:
    """Admit ranks until all have accepted, as rank 0; return, and publish to all, what is wrong, if anything."""
    verdict = _collect_ranks(store, identity, name, mine, deadline)
    store.set(f"{name}/verdict", verdict)
    if verdict:
        until = time.monotonic() + _READING_SECONDS
        while store.add(f"{name}/readers", 0) < store.add(f"{name}/num_accepted", 0) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    return verdict


def _collect_ranks(store: Store, identity: ProcessIdentity, name: str, mine: int, deadline: float) -> str:
    me = _read_request(store, mine)
    admitted: list[_JoinRequest] = []
    here: dict[int, _JoinRequest] = {} if me is None else {0: me}
    num_read = 0
    notice = _WaitNotice(identity.rank, deadline)
    while len(here) < identity.size:
        notice.log_when_due(_missing_ranks(here, identity))
        while num_read < store.add("num_join_requests", 0):
            request = _read_request(store, num_read + 1)
            if request is None:
                break  # its number is taken, its text on the way
            num_read += 1
            if request.rank == 0 and num_read > mine:
                return f"two processes say that they are rank 0: {_process_of(me)}, and {request.who}. {_RANK_HINT}"
            if request.rank != 0:
                store.set(f"admission/{request.token}", name)
                admitted.append(request)
        for request in [request for request in admitted if store.check([f"{name}/accepted/{request.token}"])]:
            admitted.remove(request)
            if request.rank in here:
                both = f"{here[request.rank].who}, and {request.who}"
                return f"two processes say that they are rank {request.rank}: {both}. {_RANK_HINT}"
            if request.size != identity.size:
                return (
                    f"rank 0 was told that there are {identity.size} processes, rank {request.rank} ({request.who}) "
                    f"that there are {request.size}. Give every launcher the same number of machines and processes "
                    "(WORLD_SIZE)"
                )
            here[request.rank] = request
        if time.monotonic() > deadline:
            return (
                f"{_missing_ranks(here, identity)} didn't come to {identity.address}:{identity.port} in time. "
                f"Check that as many processes were started as WORLD_SIZE={identity.size} says, and with this address"
            )
        time.sleep(_POLL_SECONDS)
    return ""


_RANK_HINT: Final = "Each needs its own RANK; check the machine ranks given to the launcher"


@final
class _WaitNotice:
    """The log lines about a wait: the first after a while, the next ones ever more rarely."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.rank, self.deadline, self.start = rank, deadline, time.monotonic()
        self.next_seconds = NOTICE_SECONDS

    def log_when_due(self, whom: str) -> None:
        """Log whom this rank waits for, where the next line is due."""
        now = time.monotonic()
        if now - self.start < self.next_seconds:
            return
        self.next_seconds *= 2
        left = max(0.0, self.deadline - now)
        logger.warning("Rank %d waits for %s; it will give up in %.0f s.", self.rank, whom, left)


def _missing_ranks(here: Container[int], identity: ProcessIdentity) -> str:
    absent = [str(rank) for rank in range(identity.size) if rank not in here]
    shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
    return f"rank{'s' if len(absent) > 1 else ''} {shown} of {identity.size}"


def _read_request(store: Store, number: int) -> _JoinRequest | None:
    if not store.check([f"join_request/{number}"]):
        return None
    rank, size, token, who = store.get(f"join_request/{number}").decode().split("|", 3)
    return _JoinRequest(int(rank), int(size), token, who)


def _process_of(request: _JoinRequest | None) -> str:
    return "this one" if request is None else request.who
