"""One call at the top of a script: go on from the newest valid checkpoint, or start."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing import LoadedCheckpoint, write_checkpoint
from accelerate.checkpointing import store as store_module
from accelerate.errors import CheckpointError, CheckpointNotFound
from accelerate.settings.training import ProjectOptions
from tests.unit.checkpointing.resuming import resume_models


def save(target: Path | ProjectOptions, value: float) -> Path:
    where: dict[str, Any] = {"project": target} if isinstance(target, ProjectOptions) else {"output_dir": target}
    return Path(write_checkpoint(**where, weights=[{"w": torch.full((2,), value)}], step=int(value)))


def resume(target: Path | ProjectOptions) -> tuple[float, LoadedCheckpoint | None]:
    where: dict[str, Any] = {"project": target} if isinstance(target, ProjectOptions) else {"root": target}
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((2,), -1.0))
    found = resume_models([model], **where)
    return model.w[0].item(), found


def numbered(folder: Path) -> ProjectOptions:
    return ProjectOptions(project_dir=str(folder), automatic_checkpoint_naming=True)


def test_a_new_run_starts_and_touches_nothing(tmp_path: Path) -> None:
    assert resume(numbered(tmp_path)) == (-1.0, None)
    assert resume(tmp_path / "nowhere") == (-1.0, None)
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    options = numbered(tmp_path)
    for value in range(11):
        save(options, value)
    value, found = resume(options)
    assert found is not None
    assert (value, found.step, Path(found.folder).name, found.skipped) == (10.0, 10, "checkpoint_10", {})


def test_resuming_takes_the_options_of_a_load(tmp_path: Path) -> None:
    save(tmp_path, 3)
    model = torch.nn.Module()
    model.w, model.new = (torch.nn.Parameter(torch.full((2,), -1.0)) for _ in range(2))
    with pytest.raises(CheckpointError, match="new"):
        resume_models([model], tmp_path)
    assert resume_models([model], tmp_path, strict=False) is not None
    assert (model.w[0].item(), model.new[0].item()) == (3.0, -1.0)


def test_a_broken_one_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    options = numbered(tmp_path)
    folders = [save(options, value) for value in range(2)]
    (folders[1] / "model.safetensors").write_bytes(b"")
    value, found = resume(options)
    assert found is not None
    assert value == 0.0
    assert found.skipped == {"checkpoint_1": found.skipped["checkpoint_1"]}
    assert "truncated to 0 bytes" in found.skipped["checkpoint_1"]


def test_only_broken_ones_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    options = numbered(tmp_path)
    (save(options, 0) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*missing"):
        resume(options)


def test_a_first_save_that_never_finished_is_a_fresh_start(tmp_path: Path) -> None:
    options = numbered(tmp_path)
    (save(options, 0) / "manifest.json").unlink()
    assert resume(options) == (-1.0, None)


def test_folders_with_names_of_their_own_count_by_date(tmp_path: Path) -> None:
    save(tmp_path / "step_9", 9)
    save(tmp_path / "step_10", 10)
    save(tmp_path / "epoch_0", 11)
    assert resume(tmp_path)[0] == 11.0
    assert resume(tmp_path / "step_9")[0] == 9.0
    shutil.rmtree(tmp_path / "epoch_0")
    assert resume(tmp_path)[0] == 10.0


@pytest.mark.parametrize("target", [lambda folder: folder / "run", lambda folder: folder / "run" / "last"])
def test_a_folder_whose_replacement_was_cut_short_is_found(target: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "last"
    save(folder, 1)
    child = os.fork()
    if child == 0:
        replace = os.replace

        def die_when_the_new_files_move_in(source: Path, target: Path) -> None:
            if Path(target).parent == folder and Path(target).name == "random_states_0.json":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        store_module.os.replace = die_when_the_new_files_move_in  # type: ignore[assignment]
        save(folder, 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not (folder / "manifest.json").exists()
    assert resume(target(tmp_path))[0] == 2.0


def test_without_a_folder_or_a_project_it_is_refused() -> None:
    with pytest.raises(CheckpointNotFound, match="project_dir"):
        resume(ProjectOptions())
