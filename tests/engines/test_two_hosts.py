"""Two hosts: network namespaces with names of their own and one cable between them, which can be pulled."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import NASTY, WHO, Launch
from tests.engines.network import ADDRESSES, NAMES, network, pull

PORT = "29555"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Launch, ...]]:
    """A launcher on each of two hosts, with the program who.py."""
    with network(2, tmp_path) as launchers:
        for launcher in launchers:
            shutil.copy(WHO, launcher.folder / "who.py")
        yield launchers


def machine(rank: int, *more: str, processes: int = 4) -> tuple[str, ...]:
    where = ("--main_process_ip", ADDRESSES[0], "--main_process_port", PORT)
    return (
        "--cpu",
        "--num_machines",
        "2",
        "--num_processes",
        str(processes),
        "--machine_rank",
        str(rank),
        *where,
        *more,
    )


def both(hosts: tuple[Launch, ...], words: tuple[str, ...], program: tuple[str, ...], **options: int) -> list[str]:
    """The outputs of both launchers, which ended well."""
    running = [host.start(*machine(rank, *words, **options), *program) for rank, host in enumerate(hosts)]
    ends = [process.ended() for process in running]
    assert [code for code, _ in ends] == [0, 0], "\n----\n".join(output for _, output in ends)
    return [output for _, output in ends]


def lines(hosts: tuple[Launch, ...]) -> list[dict[str, object]]:
    return [line for host in hosts for line in host.lines()]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_times_two_ranks_meet(hosts: tuple[Launch, ...], rendezvous: str) -> None:
    both(hosts, ("--rdzv_backend", rendezvous), ("who.py", "--out", ".", *NASTY))
    found = lines(hosts)
    assert sorted((line["rank"], line["local_rank"]) for line in found) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert all(line["size"] == 4 and line["sum"] == 10.0 and line["arguments"] == list(NASTY) for line in found)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_killed_rank_is_started_again_with_its_world(hosts: tuple[Launch, ...], rendezvous: str) -> None:
    both(
        hosts,
        ("--rdzv_backend", rendezvous, "--max_restarts", "2"),
        ("who.py", "--out", ".", "--fail_rank", "1"),
        processes=2,
    )
    assert sorted((line["rank"], line["sum"]) for line in lines(hosts)) == [(0, 3.0), (1, 3.0)]


def test_a_pulled_cable_ends_the_run_in_bounded_time(hosts: tuple[Launch, ...]) -> None:
    program = ("who.py", "--rounds", "2000", "--pause", "0.05", "--patience", "8")
    running = [host.start(*machine(rank, processes=2), *program) for rank, host in enumerate(hosts)]
    running[0].says("round")
    pull(1)
    pulled = time.monotonic()
    ends = [process.ended(90) for process in running]
    seconds = time.monotonic() - pulled
    outputs = "\n----\n".join(output for _, output in ends)
    assert all(code not in (0, -9) for code, _ in ends), outputs
    assert seconds < 60 and "First cause: rank" in outputs


def test_preflight_names_both_hosts(hosts: tuple[Launch, ...]) -> None:
    first, _ = both(hosts, ("--preflight",), (), processes=2)
    assert all(name in first for name in NAMES[:2]) and "rendezvous (world size 2)" in first


def test_a_name_that_no_host_has_is_refused_at_once(hosts: tuple[Launch, ...]) -> None:
    words = ("--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_port", PORT)
    code, output = hosts[1](*words, "--machine_rank", "1", "--main_process_ip", "no-such-host.invalid", "who.py")
    assert code == 2 and "can't be resolved on acc-b" in output, output
