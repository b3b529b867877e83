"""Two ranks of one process, each a thread, around a store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from accelerate.errors import CollectiveError
from accelerate.meeting import Meeting
from accelerate.meeting import seat as seat_module


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat_module, "PATIENCE_SECONDS", 0.05)


def at_the_table(*actions: Callable[[Meeting], Any], seconds: float = 5) -> list[Any]:
    """What each action returned, or the text of what it raised; one rank each."""
    store = HashStore()
    ranks = [Meeting(store, rank, len(actions), timedelta(seconds=seconds)) for rank in range(len(actions))]

    def act(rank: int) -> Any:
        try:
            return actions[rank](ranks[rank])
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(len(actions)) as pool:
        results = list(pool.map(act, range(len(actions))))
    for rank in ranks:
        rank.leave()
    return results


def test_all_arrive() -> None:
    assert at_the_table(*[lambda seat: seat.wait_for_everyone()] * 3) == [None] * 3


def test_different_operations_are_named_on_both_sides() -> None:
    first, second = at_the_table(
        lambda seat: seat.wait_for_everyone("gather"), lambda seat: seat.wait_for_everyone("reduce")
    )
    assert "Rank 0 is in `gather`, but rank 1 is in `reduce` instead" in first
    assert "Rank 1 is in `reduce`, but rank 0 is in `gather` instead" in second


def test_a_rank_that_has_left_is_named() -> None:
    _, waiting = at_the_table(lambda seat: seat.leave(), lambda seat: seat.wait_for_everyone())
    assert "Rank 1 is in `wait_for_everyone`, but rank 0 has ended" in waiting


def test_a_rank_that_left_after_the_operation_is_no_reason() -> None:
    def leave_after(seat: Meeting) -> None:
        seat.wait_for_everyone()
        seat.leave()

    assert at_the_table(leave_after, leave_after) == [None, None]


def test_a_rank_that_doesnt_come_is_named_after_the_timeout() -> None:
    waiting, _ = at_the_table(lambda seat: seat.wait_for_everyone(), lambda seat: None, seconds=0.3)
    assert "has waited 0 s for the others. Not there: rank 1." in waiting


def test_a_key_that_its_setter_cant_set_any_more() -> None:
    def go_first(seat: Meeting) -> None:
        seat.begin("main_process_first")
        seat.begin("gather")

    _, waiting = at_the_table(
        go_first, lambda seat: seat.wait_for_key(f"{seat.begin('main_process_first')}/done", setter=0)
    )
    assert "inside it rank 0 is in `gather`" in waiting


def test_a_store_that_falls_silent_is_given_up() -> None:
    unplugged = threading.Event()

    class Unplugged(HashStore):
        def check(self, keys: list[str]) -> bool:  # type: ignore[override]
            unplugged.wait(20)
            return False

    seat = Meeting(Unplugged(), 1, 2, timedelta(seconds=1))
    with pytest.raises(CollectiveError, match=r"store .* hasn't answered for 1 s"):
        seat.wait_for_everyone()
    with pytest.raises(CollectiveError, match="hasn't answered"):
        seat.wait_for_everyone()
    seat.leave()
    unplugged.set()


def test_descriptions_are_compared_on_every_rank() -> None:
    def describe(seat: Meeting) -> None:
        seat.begin("gather", with_site=True)
        seat.compare(f"shape {seat.rank}", lambda texts, sites: f"{texts} {len(sites)}")

    for message in at_the_table(describe, describe):
        assert message == "['shape 0', 'shape 1'] 2"


def test_old_keys_are_forgotten() -> None:
    def many(seat: Meeting) -> int:
        for _ in range(20):
            seat.wait_for_everyone()
        return seat.store.num_keys()

    assert all(number < 10 for number in at_the_table(many, many))


def test_what_was_begun_in_silence_is_told_once_the_waiting_gets_long() -> None:
    class Late:
        def wait(self, patience: timedelta) -> None:
            time.sleep(patience.total_seconds())
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    def gather(seat: Meeting) -> None:
        seat.begin("gather", aloud=False)
        assert not seat.store.check(["at/0"])
        seat.complete(Late())

    one, other = at_the_table(gather, lambda seat: seat.wait_for_everyone())
    assert "Rank 0 is in `gather`, but rank 1 is in `wait_for_everyone` instead" in one
    assert "Rank 1 is in `wait_for_everyone`, but rank 0 is in `gather` instead" in other


def test_a_failure_waits_for_the_others_to_say_where_they_are() -> None:
    def fail(seat: Meeting) -> str:
        seat.begin("gather", aloud=False)
        return seat.explain(RuntimeError("connection closed"))

    def come_late(seat: Meeting) -> str:
        time.sleep(0.03)
        seat.begin("reduce", aloud=False)
        return seat.explain(RuntimeError("connection closed"))

    one, other = at_the_table(fail, come_late)
    assert "rank 1 is in `reduce` instead" in one
    assert "rank 0 is in `gather` instead" in other
