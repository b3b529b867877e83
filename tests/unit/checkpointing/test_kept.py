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
from accelerate.checkpointing.kept import by_lowest_member
from accelerate.distributed.world import World
from accelerate.errors import CheckpointError
from accelerate.guests.fault_tolerance.membership import Membership


class Members:
    """Those of a rank that is the lowest one, or hears of it."""

    def __init__(self, heard: dict[str, str] | None) -> None:
        self.heard, self.is_behind, self.last_saved = heard, False, ""

    def made_by_lowest(self, _operation: str, make: Callable[[], dict[str, str]]) -> tuple[dict[str, str], bool]:
        return (make(), True) if self.heard is None else (self.heard, False)


@pytest.mark.parametrize(("rank", "is_behind", "is_written"), [(0, False, True), (0, True, False), (1, False, False)])
def test_weights_and_files_are_written_once_and_not_on_the_way_to_the_others(
    rank: int, is_behind: bool, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: Any = World(rank, 2, rank, 2, torch.device("cpu"))
    members = object.__new__(Membership)
    members.rank, members.is_joining, members.is_entering = rank, is_behind, False
    world = replace(world, replicas=members)
    monkeypatch.setattr(objects, "current_world", lambda: world)
    weights = {"weight": torch.ones(3)}
    checkpointing.save_model(weights, tmp_path / "one", world=world)
    checkpointing.save_model(weights, tmp_path / "each", world=world, on_each_node=True)
    checkpointing.save(weights, tmp_path / "weights.pt")
    checkpointing.save(weights, tmp_path / "each.pt", save_on_each_node=True)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == (4 if is_written else 0)


def run(heard: dict[str, str] | None, window: object = None) -> Any:
    project = SimpleNamespace(automatic_checkpoint_naming=True, iteration=0)
    open_window = SimpleNamespace(state_dict=lambda: window)
    return SimpleNamespace(world=SimpleNamespace(replicas=Members(heard)), project=project, open_window=open_window)


def test_the_lowest_member_saves_and_the_others_hear_where() -> None:
    saved = by_lowest_member(lambda run: "run/checkpoints/checkpoint_4")
    unsaved = by_lowest_member(lambda run: pytest.fail("it isn't the lowest"))
    assert saved(run(None)) == "run/checkpoints/checkpoint_4"
    other = run({"address": "run/checkpoints/checkpoint_4"})
    assert unsaved(other) == "run/checkpoints/checkpoint_4"
    assert other.project.iteration == 5


def test_a_process_that_comes_to_the_others_has_their_checkpoint() -> None:
    behind = run(None)
    behind.world.replicas.is_behind, behind.world.replicas.last_saved = True, "run/checkpoints/checkpoint_4"
    assert by_lowest_member(lambda run: pytest.fail("they saved"))(behind) == "run/checkpoints/checkpoint_4"


def test_an_error_of_the_one_that_saves_is_one_of_all() -> None:
    def fail(run: Any) -> str:
        raise OSError("no space left")

    for heard in (None, {"error": "OSError: no space left"}):
        with pytest.raises(CheckpointError, match="can't save: OSError: no space left"):
            by_lowest_member(fail)(run(heard))


def test_a_save_inside_of_an_accumulation_window_is_refused() -> None:
    with pytest.raises(CheckpointError, match="inside a window"):
        by_lowest_member(lambda run: "never")(run(None, window={}))
