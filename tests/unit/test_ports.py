from __future__ import annotations

import socket
from contextlib import closing

from accelerate.ports import get_free_port, is_port_in_use


def test_a_listening_port_is_in_use_until_it_is_closed() -> None:
    with closing(socket.socket()) as server:
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
    assert not is_port_in_use(port)


def test_a_free_port_can_be_bound() -> None:
    port = get_free_port()
    assert not is_port_in_use(port)
    with closing(socket.socket()) as server:
        server.bind(("", port))
