"""Saves of which one member makes the checkpoint, and all hear what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import checkpointing
from accelerate.checkpointing import objects
from accelerate.distributed.world import World
from accelerate.errors import CheckpointError
from accelerate.guests.fault_tolerance.membership import Membership


@pytest.mark.parametrize(("rank", "is_behind", "is_written"), [(0, False, True), (0, True, False), (1, False, False)])
def test_weights_and_files_are_written_once_and_not_on_the_way_to_the_others(
    rank: int, is_behind: bool, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: Any = World(rank, 2, rank, 2, torch.device("cpu"))
    members = object.__new__(Membership)
    members.rank, members.is_joining, members.is_entering = rank, is_behind, False
    world = replace(world, members=members)
    monkeypatch.setattr(objects, "current_world", lambda: world)
    weights = {"weight": torch.ones(3)}
    checkpointing.save_model(weights, tmp_path / "one", world=world)
    checkpointing.save_model(weights, tmp_path / "each", world=world, on_each_node=True)
    checkpointing.save(weights, tmp_path / "weights.pt")
    checkpointing.save(weights, tmp_path / "each.pt", save_on_each_node=True)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == (4 if is_written else 0)


def member(heard: dict[str, str] | None, *, is_behind: bool = False) -> Any:
    """Return a rank that is the lowest one, or hears of it."""
    members: Any = object.__new__(Membership)
    members.is_joining, members.is_entering, members.last_saved = is_behind, False, ""
    members.made_by_lowest = lambda _operation, make: (make(), True) if heard is None else (heard, False)
    return members


def save(members: Any, make: Callable[[], str], *, is_window_open: bool = False) -> str:
    return members.save(make, is_window_open=is_window_open)


def test_the_lowest_member_saves_and_the_others_hear_where() -> None:
    assert save(member(None), lambda: "run/checkpoints/checkpoint_4") == "run/checkpoints/checkpoint_4"
    heard = member({"address": "run/checkpoints/checkpoint_4"})
    assert save(heard, lambda: pytest.fail("it isn't the lowest")) == "run/checkpoints/checkpoint_4"


def test_a_process_that_comes_to_the_others_has_their_checkpoint() -> None:
    behind = member(None, is_behind=True)
    behind.last_saved = "run/checkpoints/checkpoint_4"
    assert save(behind, lambda: pytest.fail("they saved")) == "run/checkpoints/checkpoint_4"


def test_an_error_of_the_one_that_saves_is_one_of_all() -> None:
    def fail() -> str:
        raise OSError("no space left")

    for heard in (None, {"error": "can't save: OSError: no space left"}):
        with pytest.raises(CheckpointError, match="can't save: OSError: no space left"):
            save(member(heard), fail)


def test_a_save_inside_of_an_accumulation_window_is_refused() -> None:
    with pytest.raises(CheckpointError, match="inside a window"):
        save(member(None), lambda: "never", is_window_open=True)


@pytest.mark.parametrize("window", [None, {}])
def test_members_decide_who_calls_save_run(window: object) -> None:
    asked: list[bool] = []

    def decide(_save: object, *, is_window_open: bool) -> str:
        asked.append(is_window_open)
        return "run/checkpoints/checkpoint_4"

    run: Any = SimpleNamespace(
        world=SimpleNamespace(members=SimpleNamespace(save=decide)),
        project=SimpleNamespace(automatic_checkpoint_naming=True, iteration=0),
        open_window=SimpleNamespace(state_dict=lambda: window),
    )
    assert checkpointing.save_run(run, "folder") == "run/checkpoints/checkpoint_4"
    assert run.project.iteration == 5 and asked == [window is not None]
