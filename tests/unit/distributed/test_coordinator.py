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

from accelerate.distributed import call_rendezvous, store_client
from accelerate.distributed.mismatched_calls import Verdict
from accelerate.distributed.store_client import Coordinator
from accelerate.errors import CollectiveError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "CHECK_SECONDS", 0.05)


def run_ranks(*actions: Callable[[Coordinator], Any], seconds: float = 5) -> list[Any]:
    """Return each action's result or the text of its error; one rank each."""
    store = HashStore()
    ranks = [Coordinator(store, rank, len(actions), timedelta(seconds=seconds)) for rank in range(len(actions))]

    def act(rank: int) -> Any:
        try:
            return actions[rank](ranks[rank])
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(len(actions)) as pool:
        results = list(pool.map(act, range(len(actions))))
    for rank in ranks:
        rank.leave()
        rank.close()
    return results


def test_all_arrive() -> None:
    assert run_ranks(*[lambda coordinator: coordinator.wait_for_everyone()] * 3) == [None] * 3


def test_a_rank_that_catches_up_meets_calls_that_are_just_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rendezvous, "KEPT_CALLS", 1)

    def save_alone(coordinator: Coordinator) -> None:
        for number in range(300):
            coordinator.calls.main_alone("save", "here", moment=str(number)).finish()

    def come_late(coordinator: Coordinator) -> str:
        return coordinator.calls.main_alone("save", "here", moment="299").wait_for_outcome()

    for _ in range(3):
        assert run_ranks(save_alone, come_late, seconds=20) == [None, ""]


def test_a_rank_that_was_away_between_a_call_and_its_outcome_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rendezvous, "KEPT_CALLS", 1)
    is_there, is_deleted = threading.Event(), threading.Event()

    def save_alone(coordinator: Coordinator) -> None:
        participants = coordinator.calls.main_alone("save", "here", moment="first")
        participants.begin("here")
        is_there.wait(20)
        participants.finish()
        for number in range(3):
            coordinator.calls.main_alone("save", "here", moment=str(number)).finish()
        is_deleted.set()

    def stay_away(coordinator: Coordinator) -> str:
        participants = coordinator.calls.main_alone("save", "here", moment="first")
        is_there.set()
        is_deleted.wait(20)
        return participants.wait_for_outcome()

    assert run_ranks(save_alone, stay_away, seconds=3) == [None, ""]


def test_different_operations_are_named_on_both_sides() -> None:
    first, second = run_ranks(
        lambda coordinator: coordinator.wait_for_everyone("gather"),
        lambda coordinator: coordinator.wait_for_everyone("reduce"),
    )
    assert "Rank 0 is in `gather`, but rank 1 is in `reduce` instead" in first
    assert "Rank 1 is in `reduce`, but rank 0 is in `gather` instead" in second


def test_a_rank_that_has_left_is_named() -> None:
    _, waiting = run_ranks(lambda coordinator: coordinator.leave(), lambda coordinator: coordinator.wait_for_everyone())
    assert "Rank 1 is in `wait_for_everyone`, but rank 0 has ended" in waiting


def test_a_rank_that_left_after_the_operation_is_no_reason() -> None:
    def leave_after(coordinator: Coordinator) -> None:
        coordinator.wait_for_everyone()
        coordinator.leave()

    assert run_ranks(leave_after, leave_after) == [None, None]


def test_a_rank_that_doesnt_come_is_named_after_the_timeout() -> None:
    waiting, _ = run_ranks(lambda coordinator: coordinator.wait_for_everyone(), lambda coordinator: None, seconds=0.3)
    assert "has waited 0 s for the others. Not there: rank 1." in waiting


def test_a_key_that_its_setter_cant_set_any_more() -> None:
    def go_first(coordinator: Coordinator) -> None:
        coordinator.begin("main_process_first")
        coordinator.begin("gather")

    _, waiting = run_ranks(
        go_first,
        lambda coordinator: coordinator.wait_for_key(f"{coordinator.begin('main_process_first')}/done", setter=0),
    )
    assert "inside it rank 0 is in `gather`" in waiting


def test_a_store_that_doesnt_respond_is_an_error_after_its_timeout() -> None:
    unplugged = threading.Event()

    class Unplugged(HashStore):
        def check(self, keys: list[str]) -> bool:  # type: ignore[override]
            unplugged.wait(20)
            return False

    coordinator = Coordinator(Unplugged(), 1, 2, timedelta(seconds=1))
    with pytest.raises(CollectiveError, match=r"store .* hasn't answered for 1 s"):
        coordinator.wait_for_everyone()
    with pytest.raises(CollectiveError, match="hasn't answered"):
        coordinator.wait_for_everyone()
    coordinator.leave()
    unplugged.set()


@pytest.mark.parametrize("given", [(7, 7, 7), (7, 7, 8), (6, 7, 8)])
def test_every_rank_hears_whether_all_agree(given: tuple[int, ...]) -> None:
    def agree(coordinator: Coordinator) -> list[bool]:
        checksum = given[coordinator.rank] << 15
        found = [coordinator.agree(number, range(3)) for number in (1, checksum, 2, checksum)]
        pairs = [rank for rank in range(3) if rank != 1]
        if coordinator.rank in pairs:  # ranks of a group count their agreements apart
            found.append(coordinator.agree(checksum, pairs))
        return [*found, coordinator.agree(3, range(3))]

    def same(coordinator: Coordinator) -> list[bool]:
        found = agree(coordinator)
        assert coordinator.store.num_keys() < 10
        return found

    all_agree, ends_agree = len(set(given)) == 1, given[0] == given[2]
    pair = [ends_agree]
    expected = [True, all_agree, True, all_agree]
    found = run_ranks(same, same, same)
    assert found == [[*expected, *pair, True], [*expected, True], [*expected, *pair, True]]


def test_ranks_that_never_arrive_cant_agree() -> None:
    waiting, _ = run_ranks(lambda one: one.agree(one.begin("gather"), range(2)), lambda other: None, seconds=0.3)
    assert "Not there: rank 1." in waiting


def exchange(coordinator: Coordinator, seconds: float = 20.0) -> str | Verdict:
    return coordinator.exchange("one", str(coordinator.rank), ",".join, seconds=seconds)


def test_every_rank_gets_what_one_makes_of_the_values_of_all() -> None:
    assert run_ranks(exchange, exchange, exchange) == ["0,1,2"] * 3


def test_an_exchange_that_ends_too_late_names_the_ranks_that_gave_nothing() -> None:
    def wait(coordinator: Coordinator) -> str | Verdict:
        return exchange(coordinator, 0.5)

    one, other, _ = run_ranks(wait, wait, lambda coordinator: None)
    assert isinstance(one, Verdict) and (one.kind, one.text) == ("late", "rank 2") and one == other


@pytest.mark.parametrize("how", [Coordinator.leave, lambda coordinator: coordinator.end_exchange("one")])
def test_a_rank_that_leaves_ends_the_exchange_of_the_others(how: Callable[[Coordinator], None]) -> None:
    one, _ = run_ranks(exchange, how)
    assert isinstance(one, Verdict) and one.kind == "left"


def test_old_keys_are_deleted() -> None:
    def many(coordinator: Coordinator) -> int:
        for _ in range(20):
            coordinator.wait_for_everyone()
        return coordinator.store.num_keys()

    assert all(number < 10 for number in run_ranks(many, many))


def test_an_unpublished_operation_is_published_once_the_wait_gets_long() -> None:
    class Late:
        def wait(self, patience: timedelta) -> None:
            time.sleep(patience.total_seconds())
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    def gather(coordinator: Coordinator) -> None:
        coordinator.begin("gather", publish=False)
        assert not coordinator.store.check(["at/0"])
        coordinator.wait_for_work(Late())

    one, other = run_ranks(gather, lambda coordinator: coordinator.wait_for_everyone())
    assert "Rank 0 is in `gather`, but rank 1 is in `wait_for_everyone` instead" in one
    assert "Rank 1 is in `wait_for_everyone`, but rank 0 is in `gather` instead" in other


def test_a_failure_waits_for_the_others_to_publish_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "CHECK_SECONDS", 10)  # it ends once the other has published
    is_looking = threading.Event()

    def fail(coordinator: Coordinator) -> str:
        coordinator.begin("gather", publish=False)
        find = coordinator._find_conflict

        def look() -> Verdict | None:
            found = find()
            is_looking.set()
            while not coordinator.published(["at/1"]):  # it publishes between two looks
                time.sleep(0.01)
            return found

        monkeypatch.setattr(coordinator, "_find_conflict", look)
        return coordinator.explain(RuntimeError("connection closed"))

    def come_late(coordinator: Coordinator) -> str:
        is_looking.wait(10)
        coordinator.begin("reduce", publish=False)
        return coordinator.explain(RuntimeError("connection closed"))

    one, other = run_ranks(fail, come_late, seconds=30)
    assert "rank 1 is in `reduce` instead" in one
    assert "rank 0 is in `gather` instead" in other


def test_one_rank_examines_each_round_and_removes_the_round_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store, examined = HashStore(), list[int]()
    ranks = [Coordinator(store, rank, 3, timedelta(seconds=5)) for rank in range(2)]
    for one in ranks:
        monkeypatch.setattr(one, "_find_conflict", lambda setter, rank=one.rank: examined.append(rank))
        one.begin("gather", publish=False)
    for number in range(3):
        for one in ranks if number % 2 else reversed(ranks):
            assert one._examine("key", number) is None
        rounds = [other for other in range(3) if store.check([f"key/round/{other}"])]
        assert rounds == [number]
    assert examined == [1, 0, 1]  # whoever came first
    assert ranks[0].published(["at/0", "at/1"]).keys() == {"at/0", "at/1"}  # its operation may be what they wait for


@pytest.mark.parametrize(
    ("checks_torch", "waited_seconds", "num_groups", "asked"),
    [
        (True, 0.0, 2, [0.0]),
        (False, 4.9, 1, []),
        (False, 5.0, 1, [5.0]),
        (False, 5.0, 2, []),  # the missing ranks may be in a collective of a group that this rank isn't in
    ],
)
@pytest.mark.parametrize("conflict", [None, Verdict("left", 1)])
def test_torch_is_asked_about_missing_ranks_where_it_can_know_of_them(
    monkeypatch: pytest.MonkeyPatch,
    conflict: Verdict | None,
    checks_torch: bool,
    waited_seconds: float,
    num_groups: int,
    asked: list[float],
) -> None:
    coordinator, found = Coordinator(HashStore(), 0, 2, timedelta(seconds=5)), list[float]()
    stuck = Verdict("stuck", text="rank 1 waits")

    def stuck_in_torch(at_least_seconds: float = 0.0) -> Verdict:
        found.append(at_least_seconds)
        return stuck

    monkeypatch.setattr(coordinator, "_find_conflict", lambda setter: conflict)
    monkeypatch.setattr(coordinator, "_stuck_in_torch", stuck_in_torch)
    monkeypatch.setattr(store_client.dist, "get_pg_count", lambda: num_groups)
    coordinator.begin("gather")
    verdict = coordinator._examine("key", 0, checks_torch=checks_torch, waited_seconds=waited_seconds)
    assert found == ([] if conflict is not None else asked)
    assert verdict == (conflict or (stuck if asked else None))
