"""Two hosts: network namespaces with names of their own and one cable between them, which can be pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import NASTY, WHO, Launch, needs

NAMES = ("acc-a", "acc-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29555"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Launch, Launch]]:
    """A launcher on each of two hosts."""
    needs("ip", "unshare")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root here")
    try:
        ip("link", "add", "acc-va", "type", "veth", "peer", "name", "acc-vb")
    except subprocess.CalledProcessError:
        pytest.skip("this system doesn't allow network namespaces")
    launchers = []
    try:
        for index, (name, address, link) in enumerate(zip(NAMES, ADDRESSES, ("acc-va", "acc-vb"), strict=True)):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            rows = [f"{where} {who}" for where, who in zip(ADDRESSES, NAMES, strict=True)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
            home = tmp_path / str(index)
            home.mkdir()
            shutil.copy(WHO, home / "who.py")
            inside = ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
            launchers.append(Launch(home, variables={"GLOO_SOCKET_IFNAME": link}, prefix=inside))
        yield launchers[0], launchers[1]
    finally:
        for name in NAMES:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in map(int, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


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


def both(hosts: tuple[Launch, Launch], words: tuple[str, ...], program: tuple[str, ...], **options: int) -> list[str]:
    """The outputs of both launchers, which ended well."""
    running = [host.start(*machine(rank, *words, **options), *program) for rank, host in enumerate(hosts)]
    ends = [process.ended() for process in running]
    assert [code for code, _ in ends] == [0, 0], "\n----\n".join(output for _, output in ends)
    return [output for _, output in ends]


def lines(hosts: tuple[Launch, Launch]) -> list[dict[str, object]]:
    return [line for host in hosts for line in host.lines()]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_times_two_ranks_meet(hosts: tuple[Launch, Launch], rendezvous: str) -> None:
    both(hosts, ("--rdzv_backend", rendezvous), ("who.py", "--out", ".", *NASTY))
    found = lines(hosts)
    assert sorted((line["rank"], line["local_rank"]) for line in found) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert all(line["size"] == 4 and line["sum"] == 10.0 and line["arguments"] == list(NASTY) for line in found)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_killed_rank_is_started_again_with_its_world(hosts: tuple[Launch, Launch], rendezvous: str) -> None:
    both(
        hosts,
        ("--rdzv_backend", rendezvous, "--max_restarts", "2"),
        ("who.py", "--out", ".", "--fail_rank", "1"),
        processes=2,
    )
    assert sorted((line["rank"], line["sum"]) for line in lines(hosts)) == [(0, 3.0), (1, 3.0)]


def test_a_pulled_cable_ends_the_run_in_bounded_time(hosts: tuple[Launch, Launch]) -> None:
    program = ("who.py", "--rounds", "2000", "--pause", "0.05", "--patience", "8")
    running = [host.start(*machine(rank, processes=2), *program) for rank, host in enumerate(hosts)]
    running[0].says("round")
    ip("-n", NAMES[1], "link", "set", "acc-vb", "down")
    pulled = time.monotonic()
    ends = [process.ended(90) for process in running]
    seconds = time.monotonic() - pulled
    outputs = "\n----\n".join(output for _, output in ends)
    assert all(code not in (0, -9) for code, _ in ends), outputs
    assert seconds < 60 and "First cause: rank" in outputs


def test_preflight_names_both_hosts(hosts: tuple[Launch, Launch]) -> None:
    first, _ = both(hosts, ("--preflight",), (), processes=2)
    assert all(name in first for name in NAMES) and "rendezvous (world size 2)" in first


def test_a_name_that_no_host_has_is_refused_at_once(hosts: tuple[Launch, Launch]) -> None:
    words = ("--cpu", "--num_machines", "2", "--num_processes", "2", "--main_process_port", PORT)
    code, output = hosts[1](*words, "--machine_rank", "1", "--main_process_ip", "no-such-host.invalid", "who.py")
    assert code == 2 and "can't be resolved on acc-b" in output, output
