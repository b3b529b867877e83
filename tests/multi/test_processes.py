"""Barriers and ordered sections between real processes, in good times and bad."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.distributed.collectives import gather
from accelerate.distributed.process_control import (
    in_order,
    local_main_process_first,
    main_process_first,
    split_between_processes,
    wait_for_everyone,
)
from accelerate.distributed.world import World, join_world, leave_world
from accelerate.errors import CollectiveError
from tests.ranks import run_on_ranks


def on_ranks(function: Callable[[World], Any], num_processes: int = 2) -> list[Any]:
    """What `function(world)` returned on every rank."""
    return run_on_ranks(lambda: function(join_world()), num_processes)


def test_nobody_leaves_the_barrier_before_the_last_has_come(tmp_path: Path) -> None:
    def work(world: World) -> int:
        time.sleep(0.3 * world.rank)
        (tmp_path / str(world.rank)).touch()
        wait_for_everyone()
        return len(list(tmp_path.iterdir()))

    assert on_ranks(work, 3) == [3, 3, 3]


def test_many_barriers_leave_nothing_in_the_store() -> None:
    def work(world: World) -> int:
        assert world.coordinator is not None
        wait_for_everyone()
        before = world.coordinator.store.num_keys()
        for _ in range(50):
            wait_for_everyone()
        return world.coordinator.store.num_keys() - before

    assert all(grown <= 4 for grown in on_ranks(work))


def test_the_main_process_goes_first(tmp_path: Path) -> None:
    def work(world: World) -> bool:
        with main_process_first():
            existed = (tmp_path / "ready").exists()
            if world.is_main:
                time.sleep(0.3)
                (tmp_path / "ready").touch()
        return existed

    assert on_ranks(work, 3) == [False, True, True]


def test_the_first_of_every_host_goes_first(tmp_path: Path) -> None:
    def work() -> bool:
        import os

        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        world = join_world()
        host = world.rank // 2
        with local_main_process_first():
            existed = (tmp_path / f"ready{host}").exists()
            if world.is_local_main:
                time.sleep(0.2)
                (tmp_path / f"ready{host}").touch()
        return existed

    assert run_on_ranks(work, 4) == [False, True, False, True]


def test_a_main_process_that_fails_releases_the_others() -> None:
    def work(world: World) -> str:
        try:
            with main_process_first():
                if world.is_main:
                    raise ValueError("no such dataset")
                return "entered"
        except ValueError as error:
            return str(error)

    assert on_ranks(work, 3) == ["no such dataset", "entered", "entered"]


def test_in_order_sections_follow_the_ranks_and_survive_a_failure(tmp_path: Path) -> None:
    def work(world: World) -> None:
        try:
            with in_order():
                with (tmp_path / "log").open("a") as log:
                    log.write(str(world.rank))
                if world.rank == 1:
                    raise ValueError("rank 1 fails")
        except ValueError:
            pass
        wait_for_everyone()

    on_ranks(work, 3)
    assert (tmp_path / "log").read_text() == "012"


def test_parts_between_real_processes() -> None:
    def work(world: World) -> Any:
        with split_between_processes(torch.arange(5), apply_padding=True) as part:
            return part.tolist()

    assert on_ranks(work) == [[0, 1, 2], [3, 4, 4]]


def test_a_one_sided_barrier_is_an_error_when_the_main_process_ends() -> None:
    def work(world: World) -> str:
        if world.is_main:
            leave_world()
            time.sleep(4)  # its process, which keeps the store, lives a little longer
            return "done"
        start = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            wait_for_everyone()
        assert time.monotonic() - start < 15
        return str(caught.value)

    main, message = on_ranks(work)
    assert main == "done"
    assert "rank 0 has ended" in message
    assert "wait_for_everyone" in message
    assert "accelerator.is_main_process" in message


def test_a_one_sided_barrier_is_an_error_when_the_main_process_goes_on() -> None:
    def work(world: World) -> str:
        with pytest.raises(CollectiveError) as caught:
            if world.is_main:
                gather(torch.ones(1))
            else:
                wait_for_everyone()
        return str(caught.value)

    main, other = on_ranks(work)
    assert "`gather`" in main
    assert "rank 0 is in `gather` instead" in other
    assert "main_process_first" in other


def test_a_collective_inside_the_main_processes_block_is_named() -> None:
    def work(world: World) -> str:
        with pytest.raises(CollectiveError) as caught:
            with main_process_first():
                gather(torch.ones(1))
        return str(caught.value)

    _, other = on_ranks(work)
    assert "inside it rank 0 is in `gather`" in other


def test_a_barrier_that_takes_too_long_names_the_absent() -> None:
    def work() -> str:
        world = join_world(timeout=timedelta(seconds=3))
        if world.rank == 1:
            time.sleep(4)
            return ""
        with pytest.raises(CollectiveError) as caught:
            wait_for_everyone()
        return str(caught.value)

    message = run_on_ranks(work)[0]
    assert "has waited 3 s" in message
    assert "Not there: rank 1" in message
    assert "InitProcessGroupKwargs" in message
