"""Who is waited for, from where each rank stands."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from accelerate.errors import SettingError
from accelerate.health import watch
from accelerate.health.watch import HangWatch, Stand, verdict


def stand(rank: int, seconds: float = 60, place: str = "train.py:40", waits: bool = True) -> Stand:
    return Stand(rank, seconds, place, "loss.backward()", waits)


def test_a_rank_that_moves_elsewhere_is_waited_for() -> None:
    text = verdict([stand(0), stand(1, 0.5, "train.py:88", False), stand(2)], 30)
    assert "the others wait for rank 1, which still moves, at train.py:88" in text
    assert "2 of 3 ranks stand still" in text


def test_a_rank_that_stands_in_something_of_its_own_is_waited_for() -> None:
    assert "the others wait for rank 1, at train.py:88" in verdict([stand(0), stand(1, 60, "train.py:88", False)], 30)


def test_of_ranks_that_all_wait_the_fewest_at_one_place_are_named() -> None:
    text = verdict([stand(0), stand(1), stand(2, place="train.py:41"), stand(3)], 30)
    assert "the others wait for rank 2, at train.py:41" in text


def test_two_that_wait_in_different_calls_are_both_named() -> None:
    text = verdict([stand(0), stand(1, place="train.py:41")], 30)
    assert "in different calls: rank 0 at train.py:40 `loss.backward()`; rank 1 at train.py:41" in text


def test_a_rank_that_gives_no_answer_is_named_first() -> None:
    assert "Verdict: rank 1 gives no answer" in verdict([stand(0), None], 30)


def test_ranks_at_one_place_wait_for_no_rank() -> None:
    assert "all ranks stand at train.py:40" in verdict([stand(0, waits=False), stand(1, waits=False)], 30)


class Loop:
    """A loop that counts."""

    progress = 0


def test_a_loop_that_counts_is_never_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    loop, seat = Loop(), HangWatch(HashStore(), 0, 1, 0.5, threading.get_ident())
    seat.clocks.add(loop)
    seat.start()
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        loop.progress += 1
        time.sleep(0.01)  # the same line, and the same call, whenever one looks
    seat.stop()
    assert caplog.text == ""


def test_a_thread_that_stands_is_named_with_its_line_and_the_next_time_is_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, store = threading.Event(), HashStore()
    thread = threading.Thread(target=lambda: held.wait(10))
    thread.start()
    assert thread.ident is not None
    seat = HangWatch(store, 0, 1, 0.2, thread.ident)
    seat.start()
    time.sleep(1.5)
    seat.stop()
    held.set()
    assert "rank 0 stands for" in caplog.text
    assert "test_watch.py:" in caplog.text
    assert "held.wait(10)" in caplog.text
    assert caplog.text.count("Verdict") <= 4  # 0.2 s, 0.4 s, 0.8 s, ...


def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch.VARIABLE, "soon")
    with pytest.raises(SettingError, match="soon"):
        watch._asked_seconds()
