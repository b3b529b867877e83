"""The rendezvous: ranks as threads around a store in memory, in which dead processes have left their keys."""

from __future__ import annotations

import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
from torch.distributed import HashStore, Store, TCPStore

from accelerate.distributed import rendezvous
from accelerate.distributed.environment import ProcessIdentity
from accelerate.errors import WorldError
from accelerate.ports import get_free_port
from accelerate.versions import is_torch_version


def identity(rank: int, size: int) -> ProcessIdentity:
    return ProcessIdentity(rank, size, rank, size, "node1", 29500, "torchrun")


def call(store: Store, *identities: ProcessIdentity, seconds: float = 10) -> list[str]:
    """Return the name that each process returned, or the text of its error."""

    def answer(one: ProcessIdentity) -> str:
        try:
            return rendezvous.agree_on_name(store, one, timedelta(seconds=seconds))
        except WorldError as error:
            return f"refused: {error}"

    with ThreadPoolExecutor(len(identities)) as pool:
        return list(pool.map(answer, identities))


def test_all_agree_on_a_name_that_is_new_each_time() -> None:
    store = HashStore()
    first = call(store, *(identity(rank, 4) for rank in range(4)))
    second = call(store, *(identity(rank, 4) for rank in range(4)))
    assert len(set(first)) == len(set(second)) == 1
    assert first[0].startswith("world_")
    assert first[0] != second[0]


def test_requests_of_dead_processes_are_ignored() -> None:
    store = HashStore()
    for dead in ("0|2|a", "1|2|b", "1|9|c", "7|9|d"):
        store.set(f"join_request/{store.add('num_join_requests', 1)}", f"{dead}|gone, process 1")
    names = call(store, identity(0, 2), identity(1, 2))
    assert len(set(names)) == 1
    assert names[0].startswith("world_")


def test_the_size_may_change_between_attempts() -> None:
    store = HashStore()
    call(store, identity(0, 3), identity(1, 3), identity(2, 3))
    names = call(store, identity(0, 2), identity(1, 2))
    assert names[0] == names[1]
    assert names[0].startswith("world_")


def test_different_sizes_are_an_error_on_every_rank() -> None:
    for answer in call(HashStore(), identity(0, 2), identity(1, 3)):
        assert "rank 0 expects 2 processes, but rank 1" in answer
        assert "expects 3" in answer


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 2, 2)])
def test_a_duplicate_rank_is_an_error_on_every_rank(ranks: tuple[int, ...]) -> None:
    for answer in call(HashStore(), *(identity(rank, 3) for rank in ranks)):
        assert f"two processes say that they are rank {ranks[1]}" in answer


def test_two_rank_zeros_dont_both_form_a_world() -> None:
    answers = call(HashStore(), identity(0, 2), identity(0, 2), seconds=1)
    assert any("two processes say that they are rank 0" in answer for answer in answers)
    assert all(answer.startswith("refused") for answer in answers)


def test_missing_ranks_are_named_and_so_is_a_missing_rank_zero() -> None:
    (answer,) = call(HashStore(), identity(0, 3), seconds=0.2)
    assert "ranks 1 and 2 of 3 didn't come to node1:29500 in time" in answer
    (answer,) = call(HashStore(), identity(1, 3), seconds=0.2)
    assert "rank 1 waited 0 s for rank 0 to admit it" in answer


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_process_that_gives_up_leaves_no_thread_in_the_store(is_admitted: bool) -> None:
    """The store may end while the interpreter does, and a thread that returns from it then aborts the process."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    if is_admitted:
        server.add("num_worlds", 1)
        server.set("world_1/open", "rank 0, which has died since")
    (answer,) = call(store, identity(1, 3), seconds=0.2)
    assert f"for rank 0 {'to report that all are here' if is_admitted else 'to admit it'}" in answer
    for thread in threading.enumerate():
        if thread.name == "accelerate rendezvous":
            thread.join(20)
            assert not thread.is_alive()
    assert store.add("num_worlds", 0) == is_admitted  # the connection isn't held either


def test_a_long_wait_logs_whom_it_is_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.1)
    call(HashStore(), identity(0, 3), identity(2, 3), seconds=0.5)
    said = {record.getMessage().partition(";")[0] for record in caplog.records}
    assert said == {"Rank 0 and 1 other wait for rank 1 of 3"}


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_missing_rank_0_is_logged_until_it_admits_this_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_admitted: bool
) -> None:
    """Then rank 0 logs for the ranks that it has admitted."""
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.1)
    store = HashStore()
    if is_admitted:
        store.add("num_worlds", 1)
        store.set("world_1/open", "rank 0")
    call(store, identity(1, 3), seconds=0.5)
    said = {record.getMessage().partition(";")[0] for record in caplog.records}
    assert said == (set() if is_admitted else {"Rank 1 and 2 others of its host wait for rank 0"})


@pytest.mark.skipif(os.name != "posix", reason="torch's own listening socket is kept there")
@pytest.mark.skipif(is_torch_version("<", "2.8"), reason="torch before 2.8 takes no listening socket")
def test_a_store_at_an_ipv4_address_sees_clients_under_addresses_that_etc_hosts_names() -> None:
    """Under ::ffff:127.0.0.1, the server would ask the name server for each client, and serve nobody meanwhile."""
    one = replace(identity(0, 2), address="127.0.0.1", port=get_free_port())
    limit = timedelta(seconds=30)
    store = rendezvous._tcp_store(one, limit, "a test")
    client = TCPStore("127.0.0.1", one.port, is_master=False, wait_for_workers=False, timeout=limit)
    client.set("key", "value")
    assert store.get("key") == b"value"
    connections = psutil.Process().net_connections("tcp")
    served = [connection for connection in connections if connection.laddr and connection.laddr.port == one.port]
    assert len(served) >= 3  # the listening socket, rank 0's own connection and the client's
    assert {connection.family for connection in served} == {socket.AF_INET}
    again = rendezvous._tcp_store(one, limit, "a test")  # a second world of this process
    assert again.get("key") == b"value"


@pytest.mark.parametrize(("seconds", "warned"), [(5.0, True), (0.0, False)])
def test_a_slow_name_server_is_named_with_the_line_that_cures_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, warned: bool
) -> None:
    now = 0.0

    def look_up(address: tuple[str, int, int, int], _flags: int) -> tuple[str, str]:
        nonlocal now
        now += seconds
        assert address[0] == "::ffff:127.0.0.1"
        return address[0], "0"

    monkeypatch.setattr(socket, "getnameinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now)
    with caplog.at_level(logging.WARNING):
        rendezvous._warn_of_slow_names(replace(identity(0, 64), address="127.0.0.1"))
    said = caplog.text
    assert ("took 5 s to answer" in said and '"::ffff:127.0.0.1 node1"' in said and "64 ranks" in said) is warned
