"""Saves that the main process makes alone, in every form that programs make them in: nothing in the run changes."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.checkpointing.series import inspect
from accelerate.guests.reproduce.chain import LOCK
from accelerate.utils import ProjectConfiguration
from tests.multi.test_main_only import Messages, prepared, step
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import mostly_slow

fsspec = pytest.importorskip("fsspec")
local = pytest.importorskip("fsspec.implementations.local")

LIMIT_SECONDS = 90.0
SAVED_AT = (2, 4)


class Disk(local.LocalFileSystem):
    """A store behind a network, as far as this library can tell, that all ranks share."""

    protocol = "disk"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        one = [str(p).removeprefix("disk://") for p in path] if isinstance(path, list) else str(path)
        return super()._strip_protocol(one if isinstance(one, list) else one.removeprefix("disk://"))


fsspec.register_implementation("disk", Disk, clobber=True)

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "classic": {"checkpoint_format": "classic"},
    "on each node": {"save_on_each_node": True},
    "asynchronous": {"save_asynchronously": True},
    "local main": {},
    "remote": {},
    "remote asynchronous": {"save_asynchronously": True},
    "numbered": {"automatic_checkpoint_naming": True, "total_limit": 1},
}


def train(form: str, folder: str, saves: bool, loads: str | None = None) -> tuple[list[float], list[str]]:
    """The losses of the rest of the epoch, and what was said of other ranks' streams."""
    accelerator, model, optimizer, loader = prepared(ProjectConfiguration(folder, **FORMS[form]))
    messages, losses = Messages(), []
    if loads is not None:
        logging.getLogger("accelerate").setLevel(logging.INFO)
        accelerator.load_state(loads)
    calls = accelerator.is_local_main_process if form == "local main" else accelerator.is_main_process
    for number, rows in enumerate(loader, 1):
        losses.append(step(accelerator, model, optimizer, rows))
        if saves and calls and number in SAVED_AT:
            accelerator.save_state(*([] if form == "numbered" else [f"{folder}/checkpoint_{number}"]))
            assert accelerator.save_iteration == (SAVED_AT.index(number) + 1 if form == "numbered" else 0)
    if not saves:
        accelerator.wait_for_everyone()
    return losses, messages.about("alone")  # an asynchronous save may still be running


@functools.cache
def undisturbed() -> list[list[float]]:
    return [losses for losses, _ in run_on_ranks(train, 2, "plain", "", False, timeout_seconds=LIMIT_SECONDS)]


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["plain", "asynchronous", "remote", "numbered"]))
def test_training_goes_on_as_if_nothing_was_saved_and_all_ranks_load(tmp_path: Path, form: str) -> None:
    folder = f"disk://{tmp_path}" if "remote" in form else str(tmp_path)
    saved = run_on_ranks(train, 2, form, folder, True, timeout_seconds=LIMIT_SECONDS)
    assert [losses for losses, _ in saved] == undisturbed()
    assert [len(said) for _, said in saved] == [1, 0]
    last = f"{folder}/checkpoints/checkpoint_1" if form == "numbered" else f"{folder}/checkpoint_{SAVED_AT[-1]}"
    on_disk = Path(last.removeprefix("disk://"))
    assert inspect(on_disk, contents=True).problem is None
    assert json.loads((on_disk / "manifest.json").read_text())["details"]["absent_ranks"] == [1]
    names = {"checkpoint_1"} if form == "numbered" else {f"checkpoint_{number}" for number in SAVED_AT}
    assert {path.name for path in on_disk.parent.iterdir()} - {LOCK} == names  # no leftovers
    loaded = run_on_ranks(train, 2, form, folder, False, last, timeout_seconds=LIMIT_SECONDS)
    assert [losses for losses, _ in loaded] == [losses[SAVED_AT[-1] :] for losses in undisturbed()]
    assert [len(said) for _, said in loaded] == [1, 0]


# -- the commonest script: numbered by step, a limit of its own, resume from the latest ---------------------------

NUM_EPOCHS, EVERY, LIMIT = 3, 3, 2


def script(folder: str, dies_at: int | None, resumes: bool) -> dict[int, float]:
    accelerator, model, optimizer, loader = prepared()
    losses: dict[int, float] = {}
    done = 0
    if resumes:
        found = sorted(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[1]))
        accelerator.load_state(str(found[-1]))
        done = int(found[-1].name.split("-")[1])
    first = done // len(loader)
    for epoch in range(first, NUM_EPOCHS):
        loader.set_epoch(epoch)
        skipped = done % len(loader) if resumes and epoch == first else 0
        for rows in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            losses[done] = step(accelerator, model, optimizer, rows)
            done += 1
            if done % EVERY == 0 and accelerator.is_main_process:
                kept = sorted(Path(folder).iterdir(), key=lambda path: int(path.name.split("-")[1]))
                for path in kept[: max(0, len(kept) - LIMIT + 1)]:
                    shutil.rmtree(path)
                accelerator.save_state(f"{folder}/checkpoint-{done}")
            if done == dies_at:
                if not accelerator.is_main_process:
                    time.sleep(1)  # the other one has saved, or not
                os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
    return losses


@pytest.mark.parametrize("dies_at", [11, 17])
def test_a_script_with_a_limit_of_its_own_goes_on_from_its_latest(tmp_path: Path, dies_at: int) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_on_ranks(script, 2, str(tmp_path / "plain"), None, False, timeout_seconds=LIMIT_SECONDS)
    with pytest.raises(RankFailed, match="died"):
        run_on_ranks(script, 2, str(tmp_path / "killed"), dies_at, False, timeout_seconds=LIMIT_SECONDS)
    latest = dies_at // EVERY * EVERY
    names = {path.name for path in (tmp_path / "killed").iterdir()}
    assert names == {f"checkpoint-{latest}", f"checkpoint-{latest - EVERY}"}
    rest = run_on_ranks(script, 2, str(tmp_path / "killed"), None, True, timeout_seconds=LIMIT_SECONDS)
    assert rest == [{number: loss for number, loss in losses.items() if number >= latest} for losses in whole]


# -- numbers ------------------------------------------------------------------------------------------------------


def numbers(folder: str) -> tuple[list[str], list[int]]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator, model, optimizer, loader = prepared(project)
    folders: list[str] = []
    for number, rows in enumerate(loader):
        step(accelerator, model, optimizer, rows)
        if number == 7:
            if not accelerator.is_main_process:
                time.sleep(3)  # the main process has gone on: this rank adds its part
            folders.append(accelerator.save_state())
        elif number in (3, 4) or accelerator.is_main_process:
            folders.append(accelerator.save_state())
    accelerator.wait_for_everyone()
    return [Path(one).name for one in folders], [accelerator.save_iteration]


def test_numbers_go_on_where_the_main_process_saves_alone_and_all_save_again(tmp_path: Path) -> None:
    main, other = run_on_ranks(numbers, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    assert main == ([f"checkpoint_{number}" for number in range(8)], [8])
    assert other == (["checkpoint_3", "checkpoint_4", "checkpoint_7"], [8])
    for number in range(8):
        assert inspect(tmp_path / "checkpoints" / f"checkpoint_{number}", contents=True).problem is None


# -- what a killed late rank left ---------------------------------------------------------------------------------


def loads(folder: str) -> list[float]:
    prepared()[0].load_state(folder)
    return torch.rand(2).tolist()


def test_a_part_that_the_checkpoint_does_not_list_is_not_read(tmp_path: Path) -> None:
    run_on_ranks(train, 2, "plain", str(tmp_path), True, timeout_seconds=LIMIT_SECONDS)
    (tmp_path / "checkpoint_2" / "random_states_1.json").write_text("of another save")
    first, second = run_on_ranks(loads, 2, str(tmp_path / "checkpoint_2"), timeout_seconds=LIMIT_SECONDS)
    assert first == second  # derived
