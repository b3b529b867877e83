"""Runs are killed at random instants inside saving; what was committed must load, and be what it was taken from.

1 and 2 ranks, from the loop's own thread and in the background, numbered with a limit and into one folder, whole and in
shards. A quick sample of kills by default; ``make kills`` makes 300.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from accelerate.checkpointing import Background, agreement, list_checkpoints, read_checkpoint, write_checkpoint
from accelerate.checkpointing.dcp import ShardsItem
from accelerate.checkpointing.items import CheckpointItem
from accelerate.checkpointing.store import StagingDirectory
from accelerate.distributed.world import World, join_world
from accelerate.settings.training import ProjectOptions
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import IS_SLOW

SHAPE = (64, 64)
LIMIT = 2


class Momentum:
    """An optimizer as far as a checkpoint is concerned: its state tells the step at which it was taken."""

    def __init__(self, step: int = -1) -> None:
        self.state: dict[str, Any] = {"step": step, "buffers": [torch.full(SHAPE, float(step)) for _ in range(4)]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def place(folder: Path, style: str) -> dict[str, Any]:
    if style.startswith("in place"):
        return {"folder": folder / "ck"}
    return {"project": ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=LIMIT)}


def in_pieces(step: int, world: World) -> Callable[[StagingDirectory], list[CheckpointItem]]:
    """What a sharded strategy hands over: every rank has a part of each tensor."""
    mesh = torch.distributed.init_device_mesh("cpu", (world.size,))
    piece = torch.full((SHAPE[0] // world.size, SHAPE[1]), float(step))
    weight = DTensor.from_local(piece, mesh, [Shard(0)])
    state = {"model": {"w": weight}}
    return lambda staging: [
        ShardsItem(staging.folder / "pytorch_model_fsdp_0", state, staging.ranks, staging),
    ]


def save_for_ever(
    folder: Path, style: str, asynchronous: bool, first: int, world: World | None, report: Callable[[int], None]
) -> None:
    """Saves one step after the other, and reports each that is committed."""
    background = Background()
    is_sharded = style.endswith("shards")
    where = place(folder, style)
    target = {"output_dir": where["folder"]} if "folder" in where else where
    for step in range(first, first + 100_000):
        write_checkpoint(
            **target,
            world=world,
            weights=[] if is_sharded else [{"w": torch.full(SHAPE, float(step))}],
            write_strategy_state=in_pieces(step, world) if is_sharded and world is not None else None,
            optimizers=[Momentum(step)],
            step=step,
            background=background,
            asynchronous=asynchronous,
        )
        if not asynchronous:
            report(step)
        elif step > first:
            report(step - 1)  # this save began when that one was committed


def on_one_rank(folder: Path, style: str, asynchronous: bool, first: int, delay_seconds: float) -> None:
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            begin = arm(delay_seconds)
            save_for_ever(folder, style, asynchronous, first, None, lambda step: begin(folder, step))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def on_two_ranks(folder: Path, style: str, asynchronous: bool, first: int, delay_seconds: float) -> None:
    victims = random.Random(delay_seconds).choice([(0,), (1,), (0, 1)])

    def run() -> None:
        world = join_world(cpu=True)
        begin = arm(delay_seconds if world.rank in victims else None)

        def report(step: int) -> None:
            begin(folder if world.is_main else None, step)

        save_for_ever(folder, style, asynchronous, first, world, report)

    with pytest.raises(RankFailed, match="died with exit code -9"):
        run_on_ranks(run, 2)


def arm(delay_seconds: float | None) -> Callable[[Path | None, int], None]:
    """What writes down a committed step; the first time, it also starts the clock of this process's death."""
    is_armed: list[bool] = []

    def report(folder: Path | None, step: int) -> None:
        if folder is not None:
            beside = folder / "committed.new"
            beside.write_text(str(step))
            beside.replace(folder / "committed")
        if not is_armed and delay_seconds is not None:
            is_armed.append(True)
            kill_after(delay_seconds, os.getpid())

    return report


def kill_after(delay_seconds: float, process_id: int) -> None:
    """Another process kills this one, wherever it is then."""
    if os.fork() == 0:
        time.sleep(delay_seconds)
        os.kill(process_id, signal.SIGKILL)
        os._exit(0)


def check(folder: Path, style: str) -> int:
    """What the newest checkpoint holds is what was saved as it, and nothing committed is lost; its step."""
    model, optimizer = torch.nn.Module(), Momentum()
    model.w = torch.nn.Parameter(torch.zeros(SHAPE))
    where = place(folder, style)
    source = {"input_dir": where["folder"]} if "folder" in where else where
    found = read_checkpoint(**source, models=[model], optimizers=[optimizer])
    assert found.step is not None
    assert found.step >= int((folder / "committed").read_text())
    expected = torch.full(SHAPE, float(found.step))
    assert torch.equal(model.w, expected)
    assert optimizer.state["step"] == found.step
    assert all(torch.equal(buffer, expected) for buffer in optimizer.state["buffers"])
    if style.startswith("numbered"):
        whole = [entry for entry in list_checkpoints(folder, contents=True) if entry.problem is None]
        assert len(whole) >= min(LIMIT, found.step + 1)
    return found.step


ALL = [(num_ranks, asynchronous) for num_ranks in (1, 2) for asynchronous in (False, True)]
CASES = [(*case, style) for case in ALL for style in ("numbered", "in place")]
CASES += [(2, True, "numbered, in shards")]
if IS_SLOW:
    CASES += [(2, False, "numbered, in shards"), (2, True, "in place, in shards"), (2, False, "in place, in shards")]


@pytest.mark.timeout(1800 if IS_SLOW else 120)
@pytest.mark.parametrize(("num_ranks", "asynchronous", "style"), CASES)
def test_a_kill_at_any_instant_loses_nothing_that_was_committed(
    num_ranks: int, asynchronous: bool, style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "HEARTBEAT_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(agreement, "HEARTBEAT_SECONDS", 0.2)
    run = on_one_rank if num_ranks == 1 else on_two_ranks
    instants = random.Random(f"{num_ranks} {asynchronous} {style}")
    step = 0
    for _ in range(25 if IS_SLOW else (6, 2)[num_ranks - 1]):
        run(tmp_path, style, asynchronous, step, instants.uniform(0.0, 0.05 * num_ranks**2))
        step = check(tmp_path, style) + 1
    where = place(tmp_path, style)  # what the kills left is cleared by the next save
    target = {"output_dir": where["folder"]} if "folder" in where else where
    write_checkpoint(**target, weights=[{"w": torch.zeros(SHAPE)}], optimizers=[Momentum(step)], step=step)
    leftovers = [path for path in tmp_path.rglob(".*") if ".tmp-" in path.name or ".trash-" in path.name]
    assert leftovers == []
