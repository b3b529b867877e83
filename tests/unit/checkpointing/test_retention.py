"""Which checkpoints of a series stay: the newest, every Nth, the best, the pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import list_checkpoints, pin, unpin, write_checkpoint
from accelerate.checkpointing.series import best
from accelerate.errors import CheckpointNotFound, SettingError
from accelerate.plugins.handlers import ProjectConfiguration
from accelerate.settings.training import ProjectOptions


def project(folder: Path, **options: Any) -> ProjectOptions:
    return ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True, **options)


def save(options: ProjectOptions, step: int, **more: Any) -> str:
    return write_checkpoint(project=options, weights=[{"w": torch.zeros(1)}], step=step, **more)


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (folder / "checkpoints").iterdir())


def test_every_nth_stays_beside_the_newest(tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=2, keep_every=4)
    for step in range(11):
        save(options, step)
    assert numbers(tmp_path) == [0, 4, 8, 9, 10]


@pytest.mark.parametrize(("mode", "expected"), [("min", [1, 4, 5]), ("max", [0, 2, 5])])
def test_the_best_by_a_metric_stay_beside_the_newest(mode: str, expected: list[int], tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=1, best_metric="loss", best_mode=mode, keep_best=2)
    for step, loss in enumerate([9.0, 1.0, 8.0, 5.0, 2.0, 6.0]):
        save(options, step, metrics={"loss": torch.tensor(loss), "other": 1})
    assert numbers(tmp_path) == expected


def test_the_best_is_the_newer_of_equals_and_never_one_without_a_number(tmp_path: Path) -> None:
    options = project(tmp_path, best_metric="loss")
    for step, metrics in enumerate([{"loss": 2.0}, {"loss": 2.0}, {"loss": float("nan")}, {}, {"else": 0.0}]):
        save(options, step, metrics=metrics)
    assert [entry.name for entry in best(list_checkpoints(tmp_path), options)] == ["checkpoint_1"]


def test_pinned_ones_stay_until_they_are_unpinned(tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=1)
    first = save(options, 0, pin=True)
    second = save(options, 1)
    pin(second)
    save(options, 2)
    assert numbers(tmp_path) == [0, 1, 2]
    assert [entry.is_pinned for entry in list_checkpoints(tmp_path)] == [True, True, False]
    assert all(entry.problem is None for entry in list_checkpoints(tmp_path, contents=True))
    unpin(first)
    save(options, 3)
    assert numbers(tmp_path) == [1, 3]
    with pytest.raises(CheckpointNotFound):
        pin(tmp_path / "nowhere")


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    options = project(tmp_path, keep_every=2, best_metric="loss")
    for step in range(3):
        save(options, step, metrics={"loss": step})
    assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("options", [{"keep_every": 0}, {"keep_best": 0}, {"best_mode": "most"}, {"total_limit": 0}])
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ProjectConfiguration(**options)


def test_a_listing_knows_step_epoch_metrics_and_pins(tmp_path: Path) -> None:
    options = project(tmp_path)
    save(options, 3, metrics={"loss": 0.5}, details={"epoch": 7})
    [entry] = list_checkpoints(tmp_path)
    shown = entry.as_json()
    assert (shown["step"], shown["epoch"], shown["metrics"], shown["valid"]) == (3, 7, {"loss": 0.5}, True)
    save(options, 3, details={"step": 5000})
    assert list_checkpoints(tmp_path)[1].step == 5000
    assert (shown["world_size"], shown["strategy"], shown["pickled"]) == (1, "NO", [])


def test_folders_with_names_of_their_own_are_listed_by_date(tmp_path: Path) -> None:
    for name in ("zebra", "ant"):
        write_checkpoint(tmp_path / name, weights=[{"w": torch.zeros(1)}])
    (tmp_path / "notes").mkdir()
    assert [entry.name for entry in list_checkpoints(tmp_path)] == ["zebra", "ant"]
    assert [entry.name for entry in list_checkpoints(tmp_path / "ant")] == ["ant"]
