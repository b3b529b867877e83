"""The verdict about a hang, from the stack position of each rank."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from accelerate.distributed import watchdog
from accelerate.distributed.store_client import Coordinator
from accelerate.distributed.watchdog import HangWatch, StackPosition, verdict
from accelerate.errors import SettingError
from tests.ranks import free_port


def at(rank: int, seconds: float = 60, place: str = "train.py:40", waits: bool = True) -> StackPosition:
    return StackPosition(rank, seconds, place, "loss.backward()", waits)


def test_a_rank_that_makes_progress_elsewhere_is_waited_for() -> None:
    text = verdict([at(0), at(1, 0.5, "train.py:88", False), at(2)], 30)
    assert "the others wait for rank 1, which still makes progress, at train.py:88" in text
    assert "2 of 3 ranks are stuck" in text


def test_a_rank_that_is_stuck_in_code_of_its_own_is_waited_for() -> None:
    assert "the others wait for rank 1, at train.py:88" in verdict([at(0), at(1, 60, "train.py:88", False)], 30)


def test_of_ranks_that_all_wait_the_fewest_at_one_place_are_named() -> None:
    text = verdict([at(0), at(1), at(2, place="train.py:41"), at(3)], 30)
    assert "the others wait for rank 2, at train.py:41" in text


def test_two_that_wait_in_different_calls_are_both_named() -> None:
    text = verdict([at(0), at(1, place="train.py:41")], 30)
    assert "in different calls: rank 0 at train.py:40 `loss.backward()`; rank 1 at train.py:41" in text


def test_a_rank_that_doesnt_respond_is_named_first() -> None:
    assert "Verdict: rank 1 doesn't respond" in verdict([at(0), None], 30)


def test_ranks_at_one_place_wait_for_no_rank() -> None:
    assert "all ranks are stuck at train.py:40" in verdict([at(0, waits=False), at(1, waits=False)], 30)


def alone(store: Store) -> Coordinator:
    return Coordinator(store, 0, 1, timedelta(seconds=10))


def watch(store: Store, seconds: float, thread_id: int) -> HangWatch:
    """Return the watch of a world of one rank, which ends when the rank leaves the world."""
    coordinator = alone(store)
    coordinator.watch = HangWatch(coordinator, seconds, thread_id)
    return coordinator.watch


class Loop:
    """A loop that counts."""

    progress = 0


def test_a_loop_that_counts_is_never_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    loop, hang_watch = Loop(), watch(HashStore(), 0.5, threading.get_ident())
    hang_watch.counters.add(loop)
    hang_watch.start()
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        loop.progress += 1
        time.sleep(0.01)  # the same line, and the same call, whenever one looks
    hang_watch._coordinator.leave()
    assert caplog.text == ""


def test_a_stuck_thread_is_named_with_its_line_and_the_next_time_is_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, store = threading.Event(), HashStore()
    thread = threading.Thread(target=lambda: held.wait(10))
    thread.start()
    assert thread.ident is not None
    hang_watch = watch(store, 0.2, thread.ident)
    hang_watch.start()
    time.sleep(1.5)
    hang_watch._coordinator.leave()
    held.set()
    assert "rank 0 has been stuck for" in caplog.text
    assert "test_watchdog.py:" in caplog.text
    assert "held.wait(10)" in caplog.text
    assert caplog.text.count("Verdict") <= 4  # 0.2 s, 0.4 s, 0.8 s, ...


def test_the_rank_that_asks_is_not_ended_by_its_own_question(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait that is woken by a key reads it with a second request, which must still find it."""
    ended: list[str] = []
    monkeypatch.setattr(HangWatch, "_end_process", lambda _, reason: ended.append(reason))
    store = TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    loop, hang_watch = Loop(), watch(store, 0.02, threading.get_ident())
    hang_watch.counters.add(loop)
    position = hang_watch._position()
    monkeypatch.setattr(HangWatch, "_position", lambda *_: position)  # at once, and so what follows it
    hang_watch.start()
    until = time.monotonic() + 30
    while caplog.text.count("Verdict") < 60 and time.monotonic() < until:
        loop.progress += 1
        time.sleep(0.05)  # long enough to be asked about, each time
    hang_watch._coordinator.leave()
    assert caplog.text.count("Verdict") >= 60 and ended == []


def test_a_look_keeps_no_variable_alive() -> None:
    hang_watch = watch(HashStore(), 100.0, threading.get_ident())

    def look() -> weakref.ref[Loop]:
        loop = Loop()
        looking = threading.Thread(target=hang_watch._stalled_seconds)
        looking.start()
        looking.join()
        return weakref.ref(loop)

    gc.collect()
    gc.disable()
    try:
        assert [look()() for _ in range(3)] == [None] * 3
    finally:
        gc.enable()


def test_leaving_ends_the_watch() -> None:
    """Whether a program ends by itself or by an error: a thread that the store holds could abort the process."""
    before = set(threading.enumerate())
    coordinator = alone(HashStore())
    coordinator.watch = HangWatch(coordinator, 100.0, threading.get_ident())
    coordinator.watch.start()
    coordinator.leave()
    coordinator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()


def test_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watchdog.VARIABLE, "soon")
    with pytest.raises(SettingError, match="soon"):
        watchdog.hang_seconds()


#: Finalizers that release the GIL, in collections that begin in the watch, while other threads start.
COLLECTING = """
import gc, os, threading, time
from accelerate.distributed.watchdog import HangWatch

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        time.sleep(0.001)

def brief():
    time.sleep(0.0005)

def calls():
    while True:
        brief()

def starts():
    while True:
        threading.Thread(target=brief).start()
        time.sleep(0.001)

class World:
    store, rank, size = None, 0, 1

watch = HangWatch(World(), 100.0, threading.get_ident())
for act in [calls] * 20 + [starts] * 2:
    threading.Thread(target=act, daemon=True).start()
for _ in range(200):
    gc.set_threshold(0)  # what is thrown away here is collected in the watch
    for _ in range(4):
        Cycle()
    gc.set_threshold(3)
    watch._stalled_seconds()
    assert gc.isenabled()
    time.sleep(0.002)
gc.disable()
watch._stalled_seconds()
assert not gc.isenabled()
print("done", flush=True)
os._exit(0)
"""


def test_a_garbage_collection_never_stops_a_watched_process() -> None:
    result = subprocess.run([sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=120)
    assert result.stdout == "done\n", result.stderr
