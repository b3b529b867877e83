"""Network namespaces as hosts, with names of their own, and cables to one switch that can be pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Launch, needs

NAMES = ("acc-a", "acc-b", "acc-c", "acc-d")
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4")
SWITCH = "acc-switch"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def network(num_hosts: int, folder: Path) -> Iterator[tuple[Launch, ...]]:
    """A launcher on each of several hosts."""
    needs("ip", "unshare")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root here")
    try:
        _ip("link", "add", SWITCH, "type", "bridge")
    except subprocess.CalledProcessError:
        pytest.skip("this system doesn't allow network namespaces")
    launchers: list[Launch] = []
    hosts = [*zip(NAMES, ADDRESSES, strict=True)][:num_hosts]
    try:
        _ip("link", "set", SWITCH, "up")
        for name, address in hosts:
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}-port", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{name}-port", "master", SWITCH, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            own = Path("/etc/netns") / name
            own.mkdir(parents=True, exist_ok=True)
            rows = [f"{where} {who}" for who, where in hosts]
            (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
            home = folder / name
            home.mkdir()
            inside = ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
            launchers.append(Launch(home, variables={"GLOO_SOCKET_IFNAME": "eth0"}, prefix=inside))
        yield tuple(launchers)
    finally:
        for number, (name, _) in enumerate(hosts):
            kill_all(number)
            subprocess.run(["ip", "link", "delete", f"{name}-port"], check=False)  # the namespace may end later
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", SWITCH], check=False)


def kill_all(host: int) -> None:
    """Kill all processes of a host."""
    left = subprocess.run(["ip", "netns", "pids", NAMES[host]], capture_output=True, text=True, check=False)
    for pid in map(int, left.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pull(host: int) -> None:
    """Pull the cable of a host."""
    _ip("-n", NAMES[host], "link", "set", "eth0", "down")


def cut(host: int) -> None:
    """Let nothing that a host sends arrive; what it is sent does arrive."""
    limit = ("tbf", "rate", "8bit", "burst", "1b", "limit", "1b")
    subprocess.run(["tc", "-n", NAMES[host], "qdisc", "add", "dev", "eth0", "root", *limit], check=True)


def mend(host: int) -> None:
    """Undo `pull` and `cut`."""
    _ip("-n", NAMES[host], "link", "set", "eth0", "up")
    words = ("tc", "-n", NAMES[host], "qdisc", "del", "dev", "eth0", "root")
    subprocess.run(words, check=False, capture_output=True)
