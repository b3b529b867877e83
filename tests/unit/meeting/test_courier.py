"""Calls that can be given up."""

from __future__ import annotations

import threading
import time

import pytest

from accelerate.meeting import Courier, Silence


def test_answers_and_errors_come_back() -> None:
    courier = Courier("test")
    assert courier.ask(lambda: 42, 5) == 42
    with pytest.raises(ValueError, match="no such key"):
        courier.ask(lambda: (_ for _ in ()).throw(ValueError("no such key")), 5)
    assert courier.ask(lambda: threading.current_thread().name, 5) == "test"
    courier.dismiss()
    assert "test" not in [thread.name for thread in threading.enumerate()]


def test_a_call_that_never_returns_is_given_up_once_and_for_all() -> None:
    released = threading.Event()
    courier = Courier("test")
    with pytest.raises(Silence, match="no answer within 0 s"):
        courier.ask(released.wait, 0.1)
    start = time.monotonic()
    with pytest.raises(Silence):
        courier.ask(lambda: 1, 30)
    courier.dismiss()  # doesn't wait for it either
    assert time.monotonic() - start < 5
    released.set()


def test_a_courier_that_was_never_asked_has_no_thread() -> None:
    before = threading.active_count()
    courier = Courier("test")
    courier.dismiss()
    assert threading.active_count() == before
