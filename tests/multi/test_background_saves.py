"""Saving in the background on real ranks: nobody meets on the training's process group, and errors reach everyone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import Background, agreement, read_checkpoint, write_checkpoint
from accelerate.checkpointing import store as store_module
from accelerate.distributed.world import World, join_world
from accelerate.errors import CheckpointError
from accelerate.settings.training import ProjectOptions
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import slow


def joined() -> World:
    return join_world(cpu=True)


def numbered(folder: Path, **options: Any) -> ProjectOptions:
    return ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True, **options)


def test_ranks_agree_while_the_training_goes_on_with_collectives(tmp_path: Path) -> None:
    def attempt() -> tuple[list[str], int]:
        world, background = joined(), Background()
        fsync_path, num_meanwhile = store_module.fsync_path, 0

        def slow_fsync(path: Path) -> None:
            time.sleep(0.02)
            fsync_path(path)

        store_module.fsync_path = slow_fsync
        folders: list[str] = []
        for step in range(4):
            folders.append(
                write_checkpoint(
                    project=numbered(tmp_path, total_limit=2),
                    world=world,
                    weights=[{"w": torch.full((10,), float(step))}],
                    step=step,
                    background=background,
                    asynchronous=True,
                )
            )
            for _ in range(50):
                total = torch.ones(1)
                torch.distributed.all_reduce(total)
                assert total.item() == world.size
                num_meanwhile += background.is_running
        background.wait()
        return folders, num_meanwhile

    answers = run_on_ranks(attempt, 2)
    for folders, num_meanwhile in answers:
        assert [Path(folder).name for folder in folders] == [f"checkpoint_{number}" for number in range(4)]
        assert num_meanwhile > 4
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(10))
    assert read_checkpoint(project=numbered(tmp_path), models=[model]).step == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_the_background_of_one_rank_is_raised_on_all(failing: int, tmp_path: Path) -> None:
    def attempt() -> str:
        world, background = joined(), Background()

        def part(staging: Any) -> Any:
            def later() -> None:
                if world.rank == failing:
                    raise OSError("disk on fire")

            return later

        options: dict[str, Any] = {"background": background, "asynchronous": True}
        write_checkpoint(tmp_path / "ck", world=world, write_strategy_state=part, **options)
        with pytest.raises(CheckpointError) as caught:
            background.wait()
        return str(caught.value)

    assert all(f"rank {failing}: OSError: disk on fire" in text for text in run_on_ranks(attempt, 2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_while_the_state_is_copied_is_raised_on_all_at_once(failing: int, tmp_path: Path) -> None:
    def attempt() -> str:
        world, background = joined(), Background()

        def hook(*_: object) -> None:
            if world.rank == failing:
                raise OSError("out of paper")

        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path / "ck", world=world, pre_hooks=[hook], background=background, asynchronous=True)
        write_checkpoint(tmp_path / "next", world=world, background=background, asynchronous=True)
        background.wait()
        return str(caught.value)

    assert all(f"rank {failing}: OSError: out of paper" in text for text in run_on_ranks(attempt, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


def test_a_rank_that_dies_is_given_up_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "HEARTBEAT_TIMEOUT_SECONDS", 1.5)
    monkeypatch.setattr(agreement, "HEARTBEAT_SECONDS", 0.2)

    def attempt() -> str:
        world, background = joined(), Background()
        started = threading.Event()

        def slow() -> None:
            started.set()
            time.sleep(2.5 if world.rank == 0 else 60)  # longer than the timeout of heartbeats

        write_checkpoint(
            tmp_path / "ck",
            world=world,
            write_strategy_state=lambda staging: slow,
            background=background,
            asynchronous=True,
        )
        started.wait()
        if world.rank == 1:
            time.sleep(0.5)
            os._exit(9)
        with pytest.raises(CheckpointError) as caught:
            background.wait()
        (tmp_path / "said").write_text(str(caught.value))
        return ""

    with pytest.raises(RankFailed, match="rank 1: died with exit code 9"):
        run_on_ranks(attempt, 2)
    assert "rank 1 has sent no heartbeat" in (tmp_path / "said").read_text()
    assert not (tmp_path / "ck").exists()


def test_a_slow_rank_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "HEARTBEAT_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(agreement, "HEARTBEAT_SECONDS", 0.1)

    def attempt() -> bool:
        world, background = joined(), Background()
        write_checkpoint(
            tmp_path / "ck",
            world=world,
            write_strategy_state=lambda staging: lambda: time.sleep(3.0 * world.rank),
            background=background,
            asynchronous=True,
        )
        background.wait()
        return (tmp_path / "ck" / "manifest.json").exists()

    assert run_on_ranks(attempt, 2) == [True, True]


def test_the_files_of_two_ranks_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    def attempt() -> None:
        world, background = joined(), Background()
        torch.manual_seed(world.rank)
        model = torch.nn.Linear(5, 5)
        for name, asynchronous in (("now", False), ("later", True)):
            write_checkpoint(
                tmp_path / name,
                world=world,
                weights=[model.state_dict()],
                background=background,
                asynchronous=asynchronous,
            )
        background.wait()

    run_on_ranks(attempt, 2)
    now, later = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.name != "manifest.json"}
        for name in ("now", "later")
    )
    assert now == later
    assert len(now) == 3


SCRIPT = """
    import os, signal, sys
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, save_asynchronously=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(range(40), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    found = accelerator.resume()
    seen = open(os.path.join(sys.argv[1], f"seen_{accelerator.process_index}"), "a")
    for number, samples in enumerate(loader):
        seen.write(f"{' '.join(map(str, samples.tolist()))}\\n")
        seen.flush()
        if number == 3 and found is None:
            accelerator.save_state()
            accelerator.wait_for_checkpoint()
            if accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    accelerator.print("resumed from", os.path.basename(found or "nothing"))
    accelerator.end_training()
"""


@slow
def test_a_restarted_launch_goes_on_where_the_checkpoint_was_taken(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "2"]
    command += ["--max_restarts", "1", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from checkpoint_0" in done.stdout
    lines = [(tmp_path / f"seen_{rank}").read_text().splitlines() for rank in (0, 1)]
    before = [sample for own in lines for line in own[:4] for sample in map(int, line.split())]
    after = [sample for own in lines for line in own[-6:] for sample in map(int, line.split())]
    assert len(lines[1]) == 10  # the killed rank: 4 before, 6 after
    assert sorted(before + after) == list(range(40))
