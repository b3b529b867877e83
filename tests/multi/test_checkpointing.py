"""Saving and loading on real ranks: one folder, one verdict."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import CheckpointStore, read_checkpoint, save_model, write_checkpoint
from accelerate.checkpointing.agreement import Ranks
from accelerate.checkpointing.manifest import Manifest, measure
from accelerate.distributed.world import World, join_world
from accelerate.errors import CheckpointError, CheckpointNotFound
from accelerate.settings.training import ProjectOptions
from tests.checkpoint_parts import transaction
from tests.ranks import run_on_ranks


class Keeper:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def joined() -> World:
    return join_world(cpu=True)


def seed(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def model(value: float = 0.0) -> torch.nn.Module:
    made = torch.nn.Module()
    made.w = torch.nn.Parameter(torch.full((4,), value))
    return made


def save(folder: Path, step: int = 3) -> list[float]:
    """A save on every rank; the random numbers that follow it."""
    world = joined()
    seed(world.rank)
    loader = Keeper({"position": 5, "own": {"rank": world.rank}})
    write_checkpoint(
        folder, world=world, weights=[model(7.0).state_dict()], dataloaders=[loader], step=step, strategy="MULTI_CPU"
    )
    assert (folder / "manifest.json").exists()  # on every rank, without a barrier
    return draws()


def load(folder: Path) -> tuple[float, Any, list[float], list[str]]:
    world = joined()
    loaded, loader = model(), Keeper()
    found = read_checkpoint(folder, world=world, models=[loaded], dataloaders=[loader])
    return loaded.w.sum().item(), loader.state, draws(), found.notes


def test_two_ranks_save_and_load_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    expected = run_on_ranks(save, 2, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "random_states_0.json",
        "random_states_1.json",
        "sampler.json",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["strategy"], manifest["step"]) == (2, "MULTI_CPU", 3)
    assert len(manifest["files"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    for rank, (total, state, drawn, notes) in enumerate(run_on_ranks(load, 2, folder)):
        assert total == 28.0
        assert state == {"position": 5, "own": {"rank": rank}}
        assert drawn == expected[rank]
        assert notes == []


def test_another_number_of_ranks_loads_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    expected = run_on_ranks(save, 2, folder)
    [(total, state, drawn, notes)] = run_on_ranks(load, 1, folder)
    assert (total, state["position"], drawn) == (28.0, 5, expected[0])
    assert notes == ["saved by 2 processes, loaded by 1"]
    answers = run_on_ranks(load, 3, folder)
    assert [answer[0] for answer in answers] == [28.0] * 3
    assert [answer[2] for answer in answers[:2]] == expected
    assert answers[2][2] not in expected
    assert "random streams of rank 2 and up are derived" in answers[2][3][-1]
    assert run_on_ranks(load, 3, folder)[2][2] == answers[2][2]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_reaches_all_with_its_name(failing: int, tmp_path: Path) -> None:
    def attempt() -> tuple[str, str]:
        world = joined()

        def hook(*_: object) -> None:
            if world.rank == failing:
                raise OSError("disk on fire")

        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path / "ck", world=world, pre_hooks=[hook])
        return type(caught.value).__name__, str(caught.value)

    for name, text in run_on_ranks(attempt, 2):
        assert name == "CheckpointError"
        assert f"rank {failing}: OSError: disk on fire" in text
    assert list(tmp_path.iterdir()) == []


class Failing:
    """An object whose state can't be saved on the given ranks."""

    def __init__(self, raised: Exception | None) -> None:
        self._raised = raised

    def state_dict(self) -> Any:
        if self._raised is not None:
            raise self._raised
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.state_dict()


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_each_ranks_reason_stands_once_in_every_error(failing: tuple[int, ...], tmp_path: Path) -> None:
    """Whatever a save or a load runs of the program: blocks inside of others don't repeat what has failed."""

    def attempt() -> dict[str, str]:
        world, found = joined(), {}
        write_checkpoint(tmp_path / "whole", custom_objects=[Failing(None)], world=world)
        for kind in (OSError, ValueError, CheckpointError):
            raised = kind(f"disk {world.rank} on fire") if world.rank in failing else None
            part = Failing(raised)
            calls = {
                "save hook": lambda part=part: write_checkpoint(
                    tmp_path / "ck", world=world, pre_hooks=[lambda *_: part.state_dict()]
                ),
                "save": lambda part=part: write_checkpoint(tmp_path / "ck", custom_objects=[part], world=world),
                "load": lambda part=part: read_checkpoint(tmp_path / "whole", custom_objects=[part], world=world),
            }
            for name, call in calls.items():
                if name == "save" and 0 not in failing:
                    continue  # rank 0 alone asks such an object
                with pytest.raises((kind, CheckpointError)) as caught:
                    call()
                found[f"{name}: {kind.__name__}"] = f"{type(caught.value).__name__}: {caught.value}"
        return found

    for result in run_on_ranks(attempt, 2):
        for name, text in result.items():
            named = [text.count(f"disk {rank} on fire") for rank in range(2)]
            assert max(named) == 1 and text.count("can't") <= 1, (name, text)
            if "can't" in text:
                asked = range(1 if name.startswith("save:") else 2)
                assert named == [int(rank in failing and rank in asked) for rank in range(2)], (name, text)


def test_a_folder_that_one_rank_cannot_make_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def attempt() -> str:
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path / "file" / "ck", world=joined())
        return str(caught.value)

    assert all(
        "rank 0: NotADirectoryError" in text or "rank 0: FileExistsError" in text for text in run_on_ranks(attempt, 2)
    )


def test_a_missing_rank_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(save, 2, tmp_path / "ck")
    (tmp_path / "ck" / "random_states_1.json").unlink()

    def attempt() -> str:
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "ck")
        return str(caught.value)

    assert all("random_states_1.json: missing" in text for text in run_on_ranks(attempt, 2))


def test_a_missing_folder_is_not_found_on_every_rank(tmp_path: Path) -> None:
    def attempt() -> bool:
        with pytest.raises(CheckpointNotFound):
            load(tmp_path / "nowhere")
        return True

    assert run_on_ranks(attempt, 2) == [True, True]


def test_an_error_while_loading_on_one_rank_reaches_all(tmp_path: Path) -> None:
    run_on_ranks(save, 2, tmp_path / "ck")

    def attempt() -> str:
        world = joined()
        wanted = torch.nn.Linear(1, 1) if world.rank == 1 else model()
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(tmp_path / "ck", world=world, models=[wanted])
        return str(caught.value)

    assert all("rank 1: CheckpointError" in text and "doesn't fit" in text for text in run_on_ranks(attempt, 2))


def test_the_newest_valid_one_is_the_same_on_all_ranks_and_numbers_go_on(tmp_path: Path) -> None:
    def saves() -> list[str]:
        world = joined()
        project = ProjectOptions(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=3)
        return [
            write_checkpoint(project=project, world=world, weights=[model(float(step)).state_dict()], step=step)
            for step in range(4)
        ]

    def loads() -> tuple[int | None, list[str], float]:
        world, loaded = joined(), model()
        project = ProjectOptions(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        found = read_checkpoint(project=project, world=world, models=[loaded])
        return found.step, list(found.skipped), loaded.w[0].item()

    first = run_on_ranks(saves, 2)
    assert first[0] == first[1]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        f"checkpoint_{number}" for number in (1, 2, 3)
    ]
    (tmp_path / "checkpoints" / "checkpoint_3" / "random_states_1.json").write_text("{}")
    assert run_on_ranks(loads, 2) == [(2, ["checkpoint_3"], 2.0)] * 2
    assert Path(run_on_ranks(saves, 2)[1][0]).name == "checkpoint_4"


def test_only_the_main_process_writes_a_model_and_all_wait_for_it(tmp_path: Path) -> None:
    def attempt() -> tuple[list[str], str]:
        world = joined()
        if world.is_main:
            time.sleep(0.3)
        save_model({"w": torch.ones(3)}, tmp_path / "out", world=world)
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        torch.distributed.barrier()  # the next one writes beside it while a slower rank may still look
        bad = {"w": torch.empty(1, device="meta")} if world.is_main else {"w": torch.ones(1)}
        with pytest.raises(CheckpointError) as caught:
            save_model(bad, tmp_path / "out", world=world)
        return names, str(caught.value)

    for names, text in run_on_ranks(attempt, 2):
        assert names == ["model.safetensors"]
        assert "rank 0: CheckpointError" in text


def test_nodes_with_disks_of_their_own_each_commit_their_folder(tmp_path: Path) -> None:
    """Two ranks act as two nodes whose disks are two folders of the same name in different places."""

    def attempt(on_each_node: bool) -> list[str]:
        world = joined()
        store = CheckpointStore(tmp_path / f"disk{world.rank}" / "ck", world, on_each_node=on_each_node)
        store.ranks = _Node(world)
        with transaction(store) as staging:
            if staging.is_writer:
                with staging.create("shared") as file:
                    file.write(b"1")
            with staging.create(f"own_{world.rank}") as file:
                file.write(b"1")
        assert store.problem() is None
        return sorted(path.name for path in store.folder.iterdir())

    class _Node(Ranks):  # type: ignore[misc]
        def __init__(self, world: World) -> None:
            super().__init__(world)
            self.local_rank, self.local_size = 0, 1

        def all_gather(self, value: Any) -> list[Any]:
            said = super().all_gather(value)
            hidden = f"disk{1 - self.rank}"
            return [
                Path("/not/visible/here") / one.name if isinstance(one, Path) and hidden in str(one) else one
                for one in said
            ]

    assert run_on_ranks(attempt, 2, False) == [["manifest.json", "own_0", "shared"], ["manifest.json", "own_1"]]
    assert run_on_ranks(attempt, 2, True) == [
        ["manifest.json", "own_0", "shared"],
        ["manifest.json", "own_1", "shared"],
    ]


def _refusals(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    said = []
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError) as caught:
            call(folder)
        said.append(str(caught.value))
    return said


def test_a_manifest_that_leads_out_of_its_folder_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kept.txt").write_text("mine")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "way").symlink_to(tmp_path / "home", target_is_directory=True)
    foreign = Manifest({"way/kept.txt": measure(tmp_path / "home" / "kept.txt")}).with_identity()
    (tmp_path / "one" / "manifest.json").write_bytes(foreign.to_bytes())
    for said in run_on_ranks(_refusals, 2, str(tmp_path / "one")):
        assert all("a link that leads to" in text for text in said)
    assert (tmp_path / "home" / "kept.txt").read_text() == "mine"
