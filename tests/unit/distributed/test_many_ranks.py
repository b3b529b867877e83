"""What a rank asks of the store doesn't grow with the number of ranks; one rank examines for all that wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from accelerate.checkpointing.agreement import Ranks, StoreCollectives
from accelerate.distributed import call_rendezvous, rendezvous, store_client
from accelerate.distributed.environment import ProcessIdentity
from accelerate.distributed.store_client import Coordinator
from accelerate.distributed.store_requests import WaitingConnections, read_present
from accelerate.distributed.watchdog import HangWatch, StackPosition, verdict
from accelerate.distributed.world import World
from accelerate.errors import CollectiveError
from accelerate.torch_private.distributed import set_keys

LIMIT_SECONDS = 60.0


class CountingStore:
    """A store in memory that counts what one rank asks of it."""

    def __init__(self, store: HashStore, counts: Counter[str]) -> None:
        self.store, self.counts = store, counts

    def clone(self) -> CountingStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        pass  # that of the ranks' one store in memory

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.counts[name] += 1
            return getattr(self.store, name)(*args)

        return call


class OneConnectionStore(CountingStore):
    """A store of an older torch, which can't be cloned."""

    def clone(self) -> CountingStore:
        raise AttributeError("clone")


def act_on(
    size: int, act: Callable[[Coordinator], Any], kind: type[CountingStore] = CountingStore
) -> tuple[list[Any], list[Counter[str]]]:
    """Return what `act` returned, or the text of its error, on each rank, and what each asked of the store."""
    shared, counts = HashStore(), [Counter[str]() for _ in range(size)]
    ranks = [
        Coordinator(cast("Any", kind(shared, counts[rank])), rank, size, timedelta(seconds=20)) for rank in range(size)
    ]

    def run(rank: int) -> Any:
        try:
            return act(ranks[rank])
        except CollectiveError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), counts


def joins(coordinator: Coordinator) -> str:
    identity = ProcessIdentity(coordinator.rank, coordinator.size, 0, 1, "node1", 29500, "torchrun")
    return rendezvous.agree_on_name(coordinator.store, identity, timedelta(seconds=20))


def agrees(coordinator: Coordinator) -> None:
    coordinator.begin("gather")
    assert coordinator.agree(7, range(coordinator.size))


def saves(coordinator: Coordinator) -> tuple[list[int], str]:
    exchange = StoreCollectives(coordinator, "save/1")
    gathered = exchange.all_gather(coordinator.rank)
    with Ranks(World.pretend(coordinator.rank, coordinator.size), exchange).fail_together("save"):
        pass
    collected = exchange.gather(f"plan {coordinator.rank}")
    mine = exchange.scatter(collected)
    exchange.close()
    return gathered, mine


@pytest.mark.parametrize(
    ("act", "most"),
    [
        (joins, 10),
        (lambda coordinator: coordinator.wait_for_everyone(), 6),
        (agrees, 5),
        (lambda coordinator: coordinator.exchange("one", "", "".join, seconds=20) and None, 6),
        (saves, 20),
        (lambda coordinator: coordinator.calls.find_participants("save_state", "somewhere") and None, 24),
        (lambda coordinator: coordinator.leave(), 5),
    ],
    ids=["join", "barrier", "agree", "exchange", "save", "participants", "leave"],
)
def test_the_requests_of_a_rank_are_as_many_whatever_the_size(
    act: Callable[[Coordinator], Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_rendezvous, "_SHORTEST_PAUSE_SECONDS", 5.0)  # as on a machine with a core each
    monkeypatch.setattr(rendezvous, "_FIRST_PAUSE_SECONDS", 5.0)
    for size in (2, 8, 48):
        answers, counts = act_on(size, act)
        assert not any(isinstance(answer, str) and "Rank" in answer for answer in answers), answers
        assert max(count.total() for count in counts) <= most, (size, counts)


def test_what_is_published_is_in_the_store_when_the_call_returns() -> None:
    """A store doesn't respond to `set`, and a barrier's arrival is sent over another connection."""
    _, (count,) = act_on(1, lambda coordinator: coordinator.publish("seed/0", "7"))
    assert count == {"set": 1, "check": 1}


def test_everyone_gets_what_all_gave() -> None:
    answers, _ = act_on(5, saves)
    assert answers == [([0, 1, 2, 3, 4], f"plan {rank}") for rank in range(5)]


def test_a_store_of_one_connection_is_looked_at_instead() -> None:
    answers, _ = act_on(3, lambda coordinator: coordinator.wait_for_everyone(), OneConnectionStore)
    assert answers == [None] * 3
    answers, _ = act_on(3, saves, OneConnectionStore)
    assert answers[2] == ([0, 1, 2], "plan 2")


def test_one_rank_examines_and_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "CHECK_SECONDS", 0.2)

    def act(coordinator: Coordinator) -> None:
        if coordinator.rank == 7:
            coordinator.leave()
        else:
            coordinator.wait_for_everyone()

    answers, counts = act_on(8, act)
    for rank, answer in enumerate(answers[:7]):
        assert answer.startswith(f"Rank {rank} is in `wait_for_everyone`, but rank 7 has ended")
    assert sum(count["multi_get"] > 0 for count in counts) == 1  # who read the states of all


def test_the_watch_asks_nothing_until_a_rank_asks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatch._answers, "__defaults__", (LIMIT_SECONDS, None))  # a missing answer would take this
    ranks: list[Coordinator] = []
    lock = threading.Lock()

    def watch(coordinator: Coordinator) -> dict[int, str] | None:
        mine = coordinator.watch = HangWatch(coordinator, 100.0, threading.get_ident())
        mine.start()
        with lock:
            ranks.append(coordinator)
        time.sleep(1.5)
        if coordinator.rank:
            time.sleep(1.0)
            return None
        started = time.monotonic()
        found = mine.ask_for_stuck(range(1, coordinator.size))
        assert time.monotonic() - started < LIMIT_SECONDS / 2
        return found

    answers, counts = act_on(6, watch)
    assert answers[0] == {}  # all answered, and none is stuck
    assert max(count.total() for count in counts) <= 10, counts
    for rank in ranks:
        rank.leave()
        rank.close()


# -- the rendezvous ----------------------------------------------------------------------------------------


def join(store: HashStore, *identities: tuple[int, int], seconds: float = 10) -> list[str]:
    def one(rank_and_size: tuple[int, int]) -> str:
        rank, size = rank_and_size
        who = ProcessIdentity(rank, size, rank, size, "node1", 29500, "torchrun")
        try:
            return rendezvous.agree_on_name(store, who, timedelta(seconds=seconds))
        except Exception as error:
            return str(error)

    with ThreadPoolExecutor(len(identities)) as pool:
        return list(pool.map(one, identities))


def test_a_world_that_could_not_form_is_no_reason_for_the_next_one() -> None:
    store = HashStore()
    assert any("didn't come" in answer for answer in join(store, (0, 3), (1, 3), seconds=0.5))
    assert join(store, (0, 3), (1, 3), (2, 3)) == ["world_2"] * 3


def test_processes_that_wait_for_a_rank_0_that_has_died_join_the_next_one() -> None:
    store = HashStore()
    store.add("num_worlds", 1)  # it died before it opened its world
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(join, store, (1, 3))
        time.sleep(0.2)
        store.set("world_1/open", "a process of long ago")
        late = pool.submit(join, store, (2, 3))
        time.sleep(0.2)
        assert join(store, (0, 3)) == ["world_2"]
        assert early.result() == late.result() == ["world_2"]


def test_a_new_process_never_enters_a_closed_world() -> None:
    store = HashStore()
    assert join(store, (0, 2), (1, 2)) == ["world_1"] * 2
    with ThreadPoolExecutor(1) as pool:
        larger = pool.submit(join, store, (2, 3), (1, 3))  # before their rank 0
        time.sleep(0.2)
        assert join(store, (0, 3)) == ["world_2"]
        assert larger.result() == ["world_2"] * 2


# -- words -------------------------------------------------------------------------------------------------


def test_keys_that_are_set_are_read_by_few_requests() -> None:
    values = {f"at/{rank}": str(rank).encode() for rank in range(64) if rank != 40}
    asked: list[int] = []

    def check(keys: list[str]) -> bool:
        asked.append(len(keys))
        return all(key in values for key in keys)

    store: Any = SimpleNamespace(
        check=check, get=lambda key: values[key], multi_get=lambda keys: [values[key] for key in keys]
    )
    found = read_present(store, [f"at/{rank}" for rank in range(64)])
    assert found == {key: value.decode() for key, value in values.items()}
    assert len(asked) == 1 + 2 * 6
    values = {f"at/{rank}": b"1" for rank in range(16384)}
    asked.clear()
    assert len(read_present(store, list(values))) == 16384
    assert asked == [1024] * 16  # torch's server takes much longer for one request of so many


def test_many_keys_are_set_and_waited_for_by_requests_that_the_server_reads_well() -> None:
    store, counts = HashStore(), Counter[str]()
    counting = cast("Any", CountingStore(store, counts))
    values = {f"at/{rank}": str(rank) for rank in range(2050)}
    set_keys(counting, values)
    with WaitingConnections(counting).start(*values) as wait:
        assert wait.is_over(20)
        assert wait.response() == list(values.values())
    assert counts == {"multi_set": 3, "multi_get": 3, "check": 1}


def test_a_store_that_ends_while_it_is_connected_to_is_given_up() -> None:
    """torch would try to reach it for all of the process group's timeout."""
    is_connecting, end = threading.Event(), threading.Event()

    def clone() -> None:
        is_connecting.set()
        end.wait(60)

    def check(keys: list[str]) -> bool:
        if is_connecting.is_set():
            raise RuntimeError("Connection reset by peer")
        return False

    store: Any = SimpleNamespace(check=check, clone=clone)
    with pytest.raises(RuntimeError, match="reset by peer"), WaitingConnections(store).start("key"):
        pass
    assert not end.is_set()
    end.set()


def test_the_verdict_about_many_ranks_fits_on_a_screen() -> None:
    positions: list[StackPosition | None] = [
        StackPosition(rank, 60, "train.py:40", "loss.backward()", True) for rank in range(1000)
    ]
    positions[7] = StackPosition(7, 60, "train.py:12", "open(path)", False)
    positions[9] = None
    text = verdict(positions, 30)
    assert len(text.splitlines()) < 8
    assert "rank 7: stuck for 60 s at train.py:12 `open(path)`" in text
    assert "ranks 0, 1, 2 and 995 others: stuck for 60 s at train.py:40" in text
    assert "Verdict: rank 9 doesn't respond" in text
