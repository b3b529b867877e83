"""Requests to a store, with a timeout."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from accelerate.distributed import store_requests
from accelerate.distributed.store_requests import RequestThread, StoreTimeout, WaitingConnections


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


@pytest.mark.parametrize("has_clones", [True, False])
def test_a_wait_that_is_left_sets_its_keys_however_many_connections_a_store_has(
    has_clones: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read them: a key that nobody sets would stop them. A store of torch 2.6 has one connection."""
    store, asked = HashStore(), threading.Event()

    def connect(first: HashStore) -> HashStore:
        asked.set()
        if not has_clones:
            raise NotImplementedError
        return first

    monkeypatch.setattr(store_requests, "second_connection", connect)
    waits = WaitingConnections(store)
    for names in (["one"], ["two", "three"]):
        with waits.start(*names, given_up="left"):
            pass
        assert store.check(names) and [store.get(name) for name in names] == [b"left"] * len(names)
    with waits.start("one", given_up="again") as wait:
        assert wait.is_over(20)
    assert wait.response() == ["left"] and asked.is_set()
    waits.close()
