"""Many processes, one process group: where they meet, and what is said when they can't.

Every attempt of an elastic launcher, and every world that one process joins in turn, has its own prefix in the store:
addresses that an earlier attempt left behind are never seen.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from .clusters import ClusterSeat
from .errors import WorldError
from .settings.env import read

#: How long to wait for the other processes to appear, unless a timeout was asked for.
RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=10)
_POLL_SECONDS: Final = 0.01
_READING_SECONDS: Final = 2.0


def form_group(
    seat: ClusterSeat,
    backend: str,
    *,
    generation: int,
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
    store = PrefixStore(f"attempt_{seat.attempt}/world_{generation}", shared)
    try:
        _agree_on_places(store, seat, patience)
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
    return PrefixStore(f"accelerate/world_{generation}", dist.distributed_c10d._get_default_store())


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
    is_kept_by_agent = read("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = seat.rank == 0 and not is_kept_by_agent
    try:
        return TCPStore(
            seat.address, seat.port, is_master=keeps_store, timeout=patience, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(_unreachable(seat, patience, source, keeps_store, error)) from error


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


def _agree_on_places(store: Store, seat: ClusterSeat, patience: timedelta) -> None:
    """All ranks are here, each once, and mean a world of the same size."""
    me = f"{seat.size}|{socket.gethostname()}, process {os.getpid()}"
    deadline = time.monotonic() + patience.total_seconds()
    is_alone_in_place = store.add(f"claims/{seat.rank}", 1) == 1
    if not is_alone_in_place:
        store.set(
            "refused",
            f"two processes say that they are rank {seat.rank}: {_holder(store, seat.rank)[1]}, and "
            f"{me.partition('|')[2]}. Each needs its own RANK; check the machine ranks given to the launcher",
        )
    else:
        store.set(f"seat/{seat.rank}", me)
    if seat.rank == 0 and is_alone_in_place:
        verdict = _count_ranks(store, seat, deadline)
        store.set("verdict", verdict)
        if verdict:
            _wait_for_readers(store, seat)
    elif _appears(store, "verdict", deadline):
        verdict = store.get("verdict").decode() or _compare_sizes(store, seat.rank, seat.size, 0)
        store.add("readers", 1)
    else:
        verdict = (
            f"rank {seat.rank} waited {patience.total_seconds():.0f} s for rank 0, which never said that all are here"
        )
    if verdict:
        raise WorldError(f"The world of {seat.size} processes (rank {seat.rank} here) can't form: {verdict}.")


def _count_ranks(store: Store, seat: ClusterSeat, deadline: float) -> str:
    for rank in range(1, seat.size):
        is_there = _appears(store, f"seat/{rank}", deadline)
        if store.check(["refused"]):
            return store.get("refused").decode()
        if not is_there:
            absent = [other for other in range(seat.size) if not store.check([f"seat/{other}"])]
            return (
                f"rank {', '.join(map(str, absent))} of {seat.size} didn't come to {seat.address}:{seat.port} in time. "
                f"Check that as many processes were started as WORLD_SIZE={seat.size} says, and with this address"
            )
        wrong = _compare_sizes(store, 0, seat.size, rank)
        if wrong:
            return wrong
    return ""


def _wait_for_readers(store: Store, seat: ClusterSeat) -> None:
    """Those who are here have read the verdict, or had time to: this process may keep the store, and ends."""
    deadline = time.monotonic() + _READING_SECONDS
    num_here = sum(store.add(f"claims/{rank}", 0) for rank in range(seat.size)) - 1
    while store.add("readers", 0) < num_here and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _compare_sizes(store: Store, mine: int, size: int, other: int) -> str:
    other_size, holder = _holder(store, other)
    if int(other_size) == size:
        return ""
    return (
        f"rank {mine} was told that there are {size} processes, rank {other} ({holder}) that there are {other_size}. "
        "Give every launcher the same number of machines and processes (WORLD_SIZE)"
    )


def _holder(store: Store, rank: int) -> tuple[str, str]:
    size, _, holder = store.get(f"seat/{rank}").decode().partition("|")
    return size, holder


def _appears(store: Store, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if key != "verdict" and store.check(["refused"]):
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
