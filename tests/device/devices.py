"""Run a function on ranks that have imitated devices, and on ranks of the CPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tests.device import sim
from tests.ranks import RankFailed, run_on_ranks

LIMIT_SECONDS = 120.0
_server: Connection | None = None


def start_server() -> None:
    """Fork the process that ranks with devices are forked from, before this one computes.

    Torch's autograd counts devices in the first backward of a process, and its forks keep that number.
    """
    global _server
    _server, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        _server.close()
        _serve(theirs)
    theirs.close()


def _serve(requests: Connection) -> None:
    try:
        while True:
            environment, arguments, options = pickle.loads(requests.recv_bytes())
            os.environ.clear()
            os.environ.update(environment)
            try:
                found: list[Any] | RankFailed = run_on_ranks(*arguments, **options)
            except RankFailed as failure:
                found = failure
            requests.send_bytes(pickle.dumps(found))
    except EOFError:
        pass
    finally:
        os._exit(0)


def on_devices(
    function: Callable[..., Any], num_ranks: int = 1, *arguments: Any, num_devices: int | None = None, **options: Any
) -> list[Any]:
    """Return what each of ``num_ranks`` ranks with a device each returned."""
    assert _server is not None
    environment = {"ACCELERATE_USE_CPU": "false", "SIM_DEVICES": str(num_devices or num_ranks)}
    call = partial(_with_devices, partial(function, *arguments, **options), num_devices or num_ranks)
    options = {"timeout_seconds": LIMIT_SECONDS, "environment": environment}
    _server.send_bytes(pickle.dumps((dict(os.environ), (call, num_ranks), options)))
    found: list[Any] | RankFailed = pickle.loads(_server.recv_bytes())
    if isinstance(found, RankFailed):
        raise found
    return found


def _with_devices(function: Callable[[], Any], num_devices: int) -> Any:
    sim.start()
    sim.module.set_device_count(num_devices)
    return function()


def on_cpu(function: Callable[..., Any], num_ranks: int = 1, *arguments: Any, **options: Any) -> list[Any]:
    """Return what each of ``num_ranks`` ranks returned that compute on the CPU."""
    return run_on_ranks(partial(function, *arguments, **options), num_ranks, timeout_seconds=LIMIT_SECONDS)
