"""Connections that tell that another process has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerate.distributed import exits
from accelerate.distributed.exits import ExitWatch, has_clients

LISTENER = """
import os, sys, time
from accelerate.distributed.exits import ExitWatch
watched = ExitWatch()
print(*watched.listen(), flush=True)
if len(sys.argv) > 1 and os.fork() == 0:
    print("a child", flush=True)
    sys.stdin.read()
time.sleep(600)
"""


@pytest.mark.parametrize("arguments", [[], ["forks"]])
def test_a_process_that_is_killed_is_noticed_though_it_never_answers(arguments: list[str]) -> None:
    """Also where a process that it forked lives on, with what it had open."""
    command = [sys.executable, "-c", LISTENER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        if arguments:
            assert process.stdout.readline() == "a child\n"
        watch = ExitWatch()
        assert not watch.is_watching
        assert watch.watch(3, (host, int(port))) and watch.watch(3, (host, int(port))) and watch.is_watching
        os.kill(process.pid, signal.SIGSTOP)  # a process that stands still is none that has ended
        assert watch.ended() == []
        process.kill()
        process.wait()
        while not watch.ended():  # the kernel's word takes as long as it takes
            time.sleep(0.01)
        assert watch.ended() == [3]
        watch.close()
        assert watch.ended() == []


CLIENT = """
import os, socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of connections")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_server_knows_whether_any_other_process_is_connected(family: socket.AddressFamily) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", 0), family=family, dualstack_ipv6=family != 2))
        port = server.getsockname()[1]
        assert has_clients(port), "its own connection isn't seen, so it isn't known"
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        stack.enter_context(server.accept()[0])
        assert not has_clients(port)
        command = [sys.executable, "-c", CLIENT, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "connected\n"
            taken = server.accept()[0]
            os.kill(process.pid, signal.SIGSTOP)  # a process that stands still may go on reading
            assert has_clients(port)
            process.kill()
        while has_clients(port):
            time.sleep(0.01)
        taken.close()


def test_where_the_kernel_has_no_such_tables_anybody_may_be_connected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(exits, "Path", lambda *parts: tmp_path.joinpath("none", *parts[1:]))
    assert has_clients(29500)


def test_closing_is_as_the_end_of_the_process() -> None:
    """A rank that leaves the world makes no more calls either."""
    watched, watch = ExitWatch(), ExitWatch()
    address = watched.listen()
    assert address is not None and watched.listen() == address
    assert watch.watch(0, address) and watch.ended() == []
    watched.close()
    while not watch.ended():
        time.sleep(0.01)
    assert not watch.watch(1, address)  # nobody listens there any more
    watch.close()


def test_the_last_to_look_at_a_process_ends_the_watch() -> None:
    watched, watch = ExitWatch(), ExitWatch()
    address = watched.listen()
    assert address is not None and watch.watch(0, address) and watch.watch(0, address)
    watch.unwatch([0])
    assert watch.is_watching
    watch.unwatch([0])
    assert not watch.is_watching and watch.watch(0, address)  # again, for the next stream
    watch.close()
    watch.unwatch([0])  # a stream that is let go of after the world
    watched.close()


def test_where_there_is_no_address_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a name that nobody knows."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(exits.socket, "getaddrinfo", unknown)
    assert ExitWatch().listen() is None
