"""Many processes, one process group: where they meet, and what is said when they can't.

Every world has its own prefix in the store, agreed on by roll call: addresses that an earlier attempt left behind are
never seen.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from ..clusters import ClusterSeat
from ..errors import WorldError
from ..settings.env import read
from ..torch_private.distributed import FileStore, PrefixStore, Store, TCPStore, default_store
from . import roll_call

#: How long to wait for the other processes to appear, unless a timeout was asked for.
RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=10)
#: How long a name may stay unknown: the address of a pod is announced only after it has started.
_LOOKUP_SECONDS: Final = 60.0
_LOOKUP_PAUSE_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)
#: Stores that this process keeps for others: they outlive the world, because a slower rank may still be reading.
_kept: list[Store] = []


def form_group(
    seat: ClusterSeat,
    backend: str,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    device_id: torch.device | None = None,
    **options: Any,
) -> Store:
    """torch's default process group is initialised; returns a store that belongs to this world alone.

    Raises:
        WorldError: the others can't be reached, don't come, or disagree about the world.
    """
    patience = timeout or RENDEZVOUS_TIMEOUT
    shared = options.pop("store", None) or _meeting_place(seat, init_method, patience)
    try:
        store = PrefixStore(roll_call.answer(shared, seat, patience), shared)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=seat.rank,
            world_size=seat.size,
            **({} if timeout is None else {"timeout": timeout}),
            **({} if device_id is None else {"device_id": device_id}),
            **options,
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, WorldError):
            raise
        raise WorldError(
            f"The process group of {seat.size} processes with backend {backend!r} couldn't be made: {error} "
            f"(this is rank {seat.rank}; they meet at {_place(seat, init_method)})."
        ) from error
    return PrefixStore("meeting", store)


def store_of_group(generation: int) -> Store:
    """A store that belongs to this world alone, on top of the one that the process group was made with."""
    return PrefixStore(f"accelerate/world_{generation}", default_store())


def serves(store: Store, rank: int) -> bool:
    """Whether this process, rank ``rank``, serves ``store`` to the others, so that it ends with this process."""
    if rank != 0 or _is_served_by_agent():
        return False
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _is_served_by_agent() -> bool:
    return read("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_place(seat: ClusterSeat, init_method: str | None, patience: timedelta) -> Store:
    url = urlparse(init_method or "env://")
    if url.scheme == "file":
        path = Path(url.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileStore(str(path), seat.size)
    if url.scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise WorldError(f"init_method={init_method!r} needs a host and a port, such as tcp://10.0.0.1:29500.")
        return _tcp_store(replace(seat, address=url.hostname, port=url.port), patience, f"init_method={init_method!r}")
    if url.scheme != "env":
        raise WorldError(f"init_method={init_method!r}: known are env://, tcp://HOST:PORT and file:///PATH.")
    return _tcp_store(seat, patience, f"MASTER_ADDR={seat.address}, MASTER_PORT={seat.port}, from {seat.name}")


def _tcp_store(seat: ClusterSeat, patience: timedelta, source: str) -> Store:
    keeps_store = seat.rank == 0 and not _is_served_by_agent()
    if not keeps_store:
        _look_up(seat, patience, source)
    word = threading.Timer(roll_call.WORD_SECONDS, _say_that_it_waits, (seat, source, patience))
    word.daemon = True
    word.start()
    try:
        store = TCPStore(
            seat.address, seat.port, is_master=keeps_store, timeout=patience, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(_unreachable(seat, patience, source, keeps_store, error)) from error
    finally:
        word.cancel()
    if keeps_store:
        _kept.append(store)
    return store


def _say_that_it_waits(seat: ClusterSeat, source: str, patience: timedelta) -> None:
    logger.warning(
        "Rank %d waits for rank 0 at %s:%d (%s), where nobody answers yet; it will give up %.0f s after its start.",
        seat.rank,
        seat.address,
        seat.port,
        source,
        patience.total_seconds(),
    )


def _look_up(seat: ClusterSeat, patience: timedelta, source: str) -> None:
    """The address has a meaning here; torch would go on asking, in silence, for the whole patience."""
    start = time.monotonic()
    limit = min(_LOOKUP_SECONDS, patience.total_seconds())
    has_told = False
    while True:
        try:
            socket.getaddrinfo(seat.address, seat.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() - start > limit:
                raise WorldError(
                    f"The address of rank 0, {seat.address!r}, is not known on this host ({source}): {error}. Check "
                    "its spelling, or give the number of the address."
                ) from error
            if not has_told:
                logger.warning("%r is not known on this host yet (%s); asking for %.0f s.", seat.address, error, limit)
                has_told = True
            time.sleep(min(_LOOKUP_PAUSE_SECONDS, limit))


def _unreachable(seat: ClusterSeat, patience: timedelta, source: str, keeps_store: bool, error: Exception) -> str:
    if keeps_store and _is_in_use(error):
        return (
            f"Port {seat.port} of this host is in use by another program, or by another rank 0 "
            f"({source}). Choose another with MASTER_PORT, "
            "`accelerate launch --main_process_port N` or `torchrun --master_port N` (0: any free one), "
            "or end the program that holds it."
        )
    if keeps_store:
        return f"Rank 0 couldn't listen at {seat.address}:{seat.port} ({source}): {error}"
    return (
        f"Rank {seat.rank} of {seat.size} reached nobody at {seat.address}:{seat.port} within "
        f"{patience.total_seconds():.0f} s ({source}). Check that rank 0 runs, that the address is rank 0's host as "
        f"seen from here, and that no firewall closes the port. torch says: {error}"
    )


def _is_in_use(error: Exception) -> bool:
    text = str(error)
    return "EADDRINUSE" in text or "address already in use" in text.lower()


def _place(seat: ClusterSeat, init_method: str | None) -> str:
    return init_method or f"{seat.address}:{seat.port}"
