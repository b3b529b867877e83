"""Requests to a store, with a timeout."""

from __future__ import annotations

import threading
import time

import pytest

from accelerate.distributed.store_requests import RequestThread, StoreTimeout


def test_results_and_errors_come_back() -> None:
    requests = RequestThread("test")
    assert requests.run(lambda: 42, 5) == 42
    with pytest.raises(ValueError, match="no such key"):
        requests.run(lambda: (_ for _ in ()).throw(ValueError("no such key")), 5)
    assert requests.run(lambda: threading.current_thread().name, 5) == "test"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test")
    requests.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_after_a_timeout_every_later_request_fails_at_once() -> None:
    released = threading.Event()
    requests = RequestThread("test")
    with pytest.raises(StoreTimeout, match="no answer within 0 s"):
        requests.run(released.wait, 0.1)
    start = time.monotonic()
    with pytest.raises(StoreTimeout):
        requests.run(lambda: 1, 30)
    requests.stop()  # doesn't wait for it either
    assert time.monotonic() - start < 5
    released.set()


def test_without_a_request_no_thread_is_started() -> None:
    before = threading.active_count()
    requests = RequestThread("test")
    requests.stop()
    assert threading.active_count() == before
