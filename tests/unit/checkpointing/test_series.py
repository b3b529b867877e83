from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import list_checkpoints, read_checkpoint, write_checkpoint
from accelerate.checkpointing.series import next_number, prune
from accelerate.checkpointing.storage import storage_of
from accelerate.errors import CheckpointError, CheckpointNotFound
from accelerate.settings.training import ProjectOptions


def project(folder: Path, **options: object) -> ProjectOptions:
    return ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True, **options)  # type: ignore[arg-type]


def save(options: ProjectOptions, step: int) -> Path:
    return Path(write_checkpoint(project=options, weights=[{"w": torch.full((3,), float(step))}], step=step))


def load(options: ProjectOptions) -> tuple[int | None, float, list[str]]:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(3))
    found = read_checkpoint(project=options, models=[model])
    return found.step, model.w[0].item(), list(found.skipped)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_folders_are_numbered_from_zero(tmp_path: Path) -> None:
    options = project(tmp_path)
    assert save(options, 5) == tmp_path / "checkpoints" / "checkpoint_0"
    assert save(options, 6) == tmp_path / "checkpoints" / "checkpoint_1"
    assert options.iteration == 2


def test_a_new_process_continues_the_numbers_on_disk(tmp_path: Path) -> None:
    for number in range(12):
        save(project(tmp_path), number)  # a fresh configuration each time, as after a restart
    assert next_number(storage_of(tmp_path / "checkpoints")) == 12
    assert load(project(tmp_path)) == (11, 11.0, [])


def test_the_number_given_by_hand_is_honoured(tmp_path: Path) -> None:
    assert save(project(tmp_path, iteration=7), 1).name == "checkpoint_7"


def test_the_limit_removes_the_oldest_after_the_commit(tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=2)
    for number in range(12):
        save(options, number)
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_11"]


def test_nothing_is_removed_when_a_save_fails(tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=2)
    save(options, 0)
    save(options, 1)
    with pytest.raises(CheckpointError, match="meta"):
        write_checkpoint(project=options, weights=[{"w": torch.empty(1, device="meta")}])
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1"]
    assert options.iteration == 2


def test_the_newest_valid_one_is_loaded_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = project(tmp_path)
    folders = [save(options, step) for step in range(4)]
    (folders[3] / "model.safetensors").write_bytes(b"")
    (folders[2] / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert load(options) == (1, 1.0, ["checkpoint_3", "checkpoint_2"])
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "checkpoint_3 was skipped: model.safetensors: truncated to 0 bytes" in said
    assert "checkpoint_2 was skipped: no manifest.json" in said


def test_broken_ones_do_not_count_towards_the_limit(tmp_path: Path) -> None:
    options = project(tmp_path)
    folders = [save(options, step) for step in range(3)]
    (folders[2] / "manifest.json").unlink()
    options.total_limit = 2
    save(options, 3)
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]


def test_only_broken_ones_is_an_error_with_every_reason(tmp_path: Path) -> None:
    options = project(tmp_path)
    (save(options, 0) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint_0: model\.safetensors: missing"):
        load(options)


def test_an_empty_project_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint in"):
        load(project(tmp_path))
    with pytest.raises(ValueError, match="needs an input_dir"):
        read_checkpoint(project=ProjectOptions())
    with pytest.raises(ValueError, match="needs an output_dir"):
        write_checkpoint(project=ProjectOptions())


def test_folders_and_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    options = project(tmp_path, total_limit=1)
    save(options, 0)
    for name in ("checkpoint_best", "checkpoint_", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    save(options, 1)
    assert names(tmp_path) == ["checkpoint_", "checkpoint_1", "checkpoint_best", "notes"]


def test_a_newer_number_than_the_committed_one_is_never_removed(tmp_path: Path) -> None:
    options = project(tmp_path)
    folders = [save(options, step) for step in range(4)]
    options.total_limit = 1
    prune(storage_of(folders[0].parent), options, "checkpoint_1")
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_a_listing_shows_what_is_there_and_what_is_wrong(tmp_path: Path) -> None:
    options = project(tmp_path)
    folders = [save(options, step) for step in range(2)]
    (folders[0] / "model.safetensors").unlink()
    entries = list_checkpoints(tmp_path)
    assert [entry.name for entry in entries] == ["checkpoint_0", "checkpoint_1"]
    assert [entry.problem for entry in entries] == ["model.safetensors: missing", None]
    assert [entry.manifest.step for entry in entries if entry.manifest] == [0, 1]
    assert entries[1].num_bytes > 100
