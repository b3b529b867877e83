"""The store that answers for ranks that aren't there: no operation of a coordinator over it waits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from accelerate.checkpointing.agreement import write_on_main
from accelerate.distributed.pretended import AnsweringStore
from accelerate.distributed.store_client import Coordinator
from accelerate.distributed.world import World
from accelerate.torch_private.distributed import PrefixStore

SIZE = 16384


@pytest.fixture(params=[0, 7777, SIZE - 1])
def coordinator(request: pytest.FixtureRequest) -> Coordinator:
    """The coordinator of one rank, over a prefix, as a world makes it."""
    request.node.store = AnsweringStore(SIZE)  # a prefix of C++ keeps no reference to a store of Python
    return Coordinator(PrefixStore("world", request.node.store), request.param, SIZE, timedelta(seconds=5))


def test_everyone_is_at_each_barrier(coordinator: Coordinator) -> None:
    for _ in range(3):
        coordinator.wait_for_everyone()
    coordinator.require_all("save_state")
    assert coordinator.number == 4


def test_everyone_agrees_in_the_world_and_in_a_group(coordinator: Coordinator) -> None:
    assert coordinator.agree(7, range(SIZE)) and coordinator.agree(8, range(SIZE))
    assert coordinator.agree(9, range(coordinator.rank % 8, SIZE, 8))


def test_everyone_gives_the_same(coordinator: Coordinator) -> None:
    assert coordinator.exchange("one", "7", lambda values: str(sum(map(int, values))), seconds=5) == str(7 * SIZE)


def test_all_take_part_in_a_call(coordinator: Coordinator) -> None:
    for _ in range(2):
        participants = coordinator.calls.find_participants("save_state", "somewhere")
        assert participants.has_all and participants.is_main == (coordinator.rank == 0)


def test_the_main_process_has_written(coordinator: Coordinator) -> None:
    written: list[int] = []
    world = World.pretend(coordinator.rank, SIZE, coordinator=coordinator)
    write_on_main(world, "save_model", "somewhere", lambda: written.append(coordinator.rank), "save")
    assert written == [0] * (coordinator.rank == 0)


def test_leaving_waits_for_nobody(coordinator: Coordinator) -> None:
    coordinator.leave()
    coordinator.wait_for_readers()


def test_what_this_rank_has_set_is_what_it_reads() -> None:
    store = AnsweringStore(4)
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["key", "other"])
    assert store.add("number", 2) == 2 and store.add("number", 3) == 5
    assert store.compare_set("first", "", "mine") == b"mine" == store.compare_set("first", "", "other")
    assert store.delete_key("first") and not store.delete_key("first")
