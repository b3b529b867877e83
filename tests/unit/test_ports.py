from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing

import pytest

from accelerate.ports import claim_port, get_free_port, is_port_in_use, release_ports


def test_a_listening_port_is_in_use_until_it_is_closed() -> None:
    with closing(socket.socket()) as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
    assert not is_port_in_use(port)


def test_a_free_port_can_be_bound_and_is_none_of_an_outgoing_connection() -> None:
    port = get_free_port()
    assert 15_000 <= port < 32_000
    assert not is_port_in_use(port)
    with closing(socket.socket()) as server:
        server.bind(("", port))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="claims are Linux's")
def test_a_port_is_claimed_by_one_process_at_a_time() -> None:
    port = get_free_port()
    other = [sys.executable, "-c", f"from accelerate.ports import claim_port; print(claim_port({port}))"]
    assert claim_port(port) and claim_port(port)
    assert subprocess.run(other, capture_output=True, text=True, check=True).stdout == "False\n"
    release_ports()
    assert subprocess.run(other, capture_output=True, text=True, check=True).stdout == "True\n"
    assert claim_port(port)  # the other's claim has ended with it
    release_ports()
