"""Calls that the main process makes alone: no other rank is needed for them, and training goes on."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing.series import inspect
from accelerate.distributed import call_rendezvous
from accelerate.errors import CheckpointError
from accelerate.optional import can_be_found
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    set_seed,
)
from tests.ranks import run_on_ranks

LIMIT_SECONDS = 60.0
NUM_STEPS = 4
ROWS = [torch.tensor([float(number)]) for number in range(8)]


def prepared(project: ProjectConfiguration | None = None, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, project_config=project, **options)
    set_seed(3)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader([torch.tensor([float(i)]) for i in range(32)], batch_size=2, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, rows: torch.Tensor) -> float:
    with accelerator.accumulate(model):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


class Messages(logging.Handler):
    """What was logged in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.levels: list[str] = []
        logging.getLogger("accelerate").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.levels.append(record.levelname)

    def about(self, text: str) -> list[str]:
        return [one for one in self.texts if text in one]


def saves_every_second_step(folder: str, saves: bool) -> tuple[list[float], list[str], list[float]]:
    accelerator, model, optimizer, loader = prepared()
    messages, losses, seconds = Messages(), [], []
    for number, rows in enumerate(loader):
        losses.append(step(accelerator, model, optimizer, rows))
        if saves and number % 2 == 1 and accelerator.is_main_process:
            began = time.monotonic()
            accelerator.save_state(f"{folder}/checkpoint-{number}")
            seconds.append(time.monotonic() - began)
    accelerator.wait_for_everyone()
    return losses, messages.about("by the main process alone"), seconds


def test_a_save_by_the_main_process_alone_is_committed_and_training_goes_on(tmp_path: Path) -> None:
    plain = run_on_ranks(saves_every_second_step, 2, str(tmp_path), False, timeout_seconds=LIMIT_SECONDS)
    assert list(tmp_path.iterdir()) == []
    saving = run_on_ranks(saves_every_second_step, 2, str(tmp_path), True, timeout_seconds=LIMIT_SECONDS)
    assert [losses for losses, _, _ in saving] == [losses for losses, _, _ in plain]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{n}" for n in (1, 3, 5, 7))
    _, warned, seconds = saving[0]
    assert len(warned) == 1 and "random streams of rank 1 and its own parts of loaders" in warned[0]
    assert seconds[0] < 8 and max(seconds[1:]) < seconds[0], seconds  # it waits for the others only the first time
    manifest = json.loads((tmp_path / "checkpoint-7" / "manifest.json").read_text())
    assert manifest["details"]["absent_ranks"] == [1] and manifest["world_size"] == 2


def comes_late(folder: str, together: bool, asynchronous: bool) -> tuple[list[str], list[float], list[list[float]]]:
    accelerator, model, optimizer, loader = prepared(ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    messages, draws, folders = Messages(), [], []
    if accelerator.process_index == 1:
        torch.rand(1)  # its streams are its own
    for number, rows in enumerate(loader):
        step(accelerator, model, optimizer, rows)
        if number == 0 and accelerator.process_index == 1 and not together:
            time.sleep(3.5)  # the main process has gone on
        if number < 3:
            folders.append(accelerator.save_state(asynchronous=asynchronous))
            draws.append(torch.rand(2).tolist())
    accelerator.wait_for_checkpoint()
    accelerator.wait_for_everyone()
    assert accelerator.save_iteration == 3
    again: list[list[float]] = []
    for one in folders:
        accelerator.load_state(one)
        again.append(torch.rand(2).tolist())
    assert again == draws
    return folders, messages.about("by the main process alone"), messages.about("derived")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("together", [True, False])
def test_a_rank_that_comes_late_adds_its_part_and_is_waited_for_from_then_on(
    tmp_path: Path, together: bool, asynchronous: bool
) -> None:
    late = run_on_ranks(comes_late, 2, str(tmp_path), together, asynchronous, timeout_seconds=LIMIT_SECONDS)
    folders = [Path(one) for one in late[0][0]]
    assert [one.name for one in folders] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert late[1][0] == late[0][0]  # every rank is told the folder
    assert [len(one[1]) for one in late] == [0 if together else 1, 0] and late[0][2] == late[1][2] == []
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert "absent_ranks" not in manifest["details"], folder
        assert {"random_states_0.json", "random_states_1.json"} <= set(manifest["files"])
        assert inspect(folder, contents=True).problem is None


def saves_alone(folder: str, seeded_by_rank: bool) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=seeded_by_rank)
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("seeded_by_rank", [False, True])
def test_derived_streams_are_in_step_where_the_saved_ones_were(tmp_path: Path, seeded_by_rank: bool) -> None:
    run_on_ranks(saves_alone, 2, str(tmp_path / "ck"), seeded_by_rank, timeout_seconds=LIMIT_SECONDS)

    def draws() -> list[float]:
        Accelerator(cpu=True).load_state(str(tmp_path / "ck"))
        return torch.rand(3).tolist()

    first, second = run_on_ranks(draws, 2, timeout_seconds=LIMIT_SECONDS)
    assert (first == second) is not seeded_by_rank


def resumes(folder: str, num_steps: int, level: int) -> tuple[list[float], list[str]]:
    accelerator, *_ = prepared()
    messages = Messages()
    logging.getLogger("accelerate.checkpointing").setLevel(level)
    accelerator.load_state(folder)
    return torch.rand(num_steps).tolist(), messages.about("derived")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_save_of_the_main_process_alone_loads_on_any_number_of_ranks(tmp_path: Path, num_ranks: int) -> None:
    run_on_ranks(saves_every_second_step, 2, str(tmp_path), True, timeout_seconds=LIMIT_SECONDS)
    folder = str(tmp_path / "checkpoint-5")
    first = run_on_ranks(resumes, num_ranks, folder, 3, logging.INFO, timeout_seconds=LIMIT_SECONDS)
    again = run_on_ranks(resumes, num_ranks, folder, 3, logging.WARNING, timeout_seconds=LIMIT_SECONDS)
    assert [drawn for drawn, _ in first] == [drawn for drawn, _ in again]  # derived, not left to chance
    # That rank 1's random streams, and nothing else, are derived is no warning: nobody has to act on it.
    for answers, num_notes in ((first, num_ranks - 1), (again, max(0, num_ranks - 2))):
        assert [len(texts) for _, texts in answers] == [num_notes] + [0] * (num_ranks - 1)


class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream, whose position in each rank is that rank's own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS)


def diffusion_run(folder: str, kind: str, loads: bool) -> list[tuple[str, str]]:
    """Save on the main process, as the example scripts of diffusers do, or load twice; return what load_state logs."""
    is_stream = kind == "stream"
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stream, dispatch_batches=False if is_stream else None)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(3)
    model = nn.Linear(1, 1)
    rows: Any = Rows() if is_stream else ROWS
    loader = DataLoader(rows, 2, shuffle=None if is_stream else True, num_workers=1 if kind == "workers" else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "model alone":
        model = accelerator.prepare(model)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "hooks":  # which write and read the model themselves
        accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, _: models.clear())
    if not loads:
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            break
        if accelerator.is_main_process:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        return []
    messages = Messages()
    logging.getLogger("accelerate.checkpointing").setLevel(logging.INFO)
    for _ in range(2):
        accelerator.load_state(folder)
    return [(level, text) for level, text in zip(messages.levels, messages.texts, strict=True) if "derived" in text]


@pytest.mark.parametrize("kind", ["all", "workers", "hooks", "model alone"])
def test_a_resume_of_which_only_random_streams_differ_says_so_once_and_doesnt_warn(tmp_path: Path, kind: str) -> None:
    folder = str(tmp_path / "checkpoint-1")
    run_on_ranks(diffusion_run, 2, folder, kind, False, timeout_seconds=LIMIT_SECONDS)
    main, other = run_on_ranks(diffusion_run, 2, folder, kind, True, timeout_seconds=LIMIT_SECONDS)
    why = "the main process saved it alone, without the random streams of rank 1: they are derived from the main"
    assert main == [("INFO", f"Checkpoint {folder}: {why} process's")] and other == []


def test_a_resume_of_a_checkpoint_of_another_program_doesnt_warn_of_random_streams(tmp_path: Path) -> None:
    """It holds those of the main process alone where the script saved there."""
    write_foreign(tmp_path / "ck")
    main, other = run_on_ranks(
        diffusion_run, 2, str(tmp_path / "ck"), "model alone", True, timeout_seconds=LIMIT_SECONDS
    )
    assert [level for level, _ in main] == ["INFO"] and "random streams of rank 1 and up" in main[0][1] and other == []


@pytest.mark.skipif(not can_be_found("torchdata"), reason="needs torchdata")
def test_a_resume_without_a_ranks_positions_in_loaders_warns(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint-1")
    run_on_ranks(diffusion_run, 2, folder, "stream", False, timeout_seconds=LIMIT_SECONDS)
    main, _ = run_on_ranks(diffusion_run, 2, folder, "stream", True, timeout_seconds=LIMIT_SECONDS)
    assert [level for level, _ in main] == ["WARNING"] * 2 and "rank 1 and its own positions in loaders" in main[0][1]


def write_foreign(folder: Path) -> None:
    """Write the files that other programs of this interface leave of one process."""
    folder.mkdir()
    torch.save(nn.Linear(1, 1).state_dict(), folder / "pytorch_model.bin")
    streams = {"step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    torch.save({**streams, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")


def writes_alone(folder: str) -> list[str]:
    accelerator, model, optimizer, loader = prepared()
    if accelerator.is_main_process:
        accelerator.save_model(model, f"{folder}/model")
        accelerator.save(accelerator.get_state_dict(model), f"{folder}/state.bin")
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/own.bin")
    for rows in loader:
        step(accelerator, model, optimizer, rows)
        break
    accelerator.save_model(model, f"{folder}/all")
    return sorted(path.name for path in Path(folder).iterdir())


def test_models_are_saved_by_the_main_process_alone_or_by_all(tmp_path: Path) -> None:
    seen = run_on_ranks(writes_alone, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    assert seen == [["all", "model", "own.bin", "state.bin"]] * 2
    assert (tmp_path / "all" / "model.safetensors").is_file()


def fails_alone(folder: str) -> list[str]:
    accelerator, model, *_ = prepared()
    (Path(folder) / "file").touch()
    texts = []
    for save in (
        lambda: accelerator.save_model(model, f"{folder}/file"),
        lambda: accelerator.save_state(f"{folder}/file"),
    ):
        if accelerator.process_index == 1:
            time.sleep(2.5)
        try:
            save()
        except CheckpointError as error:
            texts.append(str(error))
        accelerator.wait_for_everyone()
    return texts


def test_an_error_of_the_main_process_is_an_error_of_the_ranks_that_come_late(tmp_path: Path) -> None:
    for texts in run_on_ranks(fails_alone, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS):
        assert len(texts) == 2 and all("is a file" in text for text in texts), texts


def fails_before_it_has_a_folder(folder: str) -> list[str]:
    (Path(folder) / "checkpoints").touch()  # a file, where numbered folders are looked for
    accelerator, *_ = prepared(ProjectConfiguration(f"{folder}/checkpoints", automatic_checkpoint_naming=True))
    if accelerator.process_index == 1:
        time.sleep(2.5)
    with pytest.raises(CheckpointError) as raised:
        accelerator.save_state()
    accelerator.wait_for_everyone()
    return [str(raised.value)]


def test_late_ranks_learn_of_an_error_before_anything_was_written(tmp_path: Path) -> None:
    for texts in run_on_ranks(fails_before_it_has_a_folder, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS):
        assert "Error" in texts[0], texts


def helper(accelerator: Any, folder: str) -> None:
    accelerator.save_state(folder)


def alone_then_together(folder: str) -> float:
    accelerator, model, optimizer, loader = prepared()
    for number, rows in enumerate(loader):
        step(accelerator, model, optimizer, rows)
        if accelerator.is_main_process and number < 3:
            helper(accelerator, f"{folder}/latest")
    if accelerator.is_main_process:
        helper(accelerator, f"{folder}/main")
    helper(accelerator, f"{folder}/last")
    draw = torch.rand(1).item()
    torch.rand(7)
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{folder}/last")
    assert torch.rand(1).item() == draw
    return draw


def test_saves_by_one_and_by_all_from_one_line_are_told_apart(tmp_path: Path) -> None:
    run_on_ranks(alone_then_together, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    absent = {
        path.name: json.loads((path / "manifest.json").read_text())["details"].get("absent_ranks")
        for path in tmp_path.iterdir()
    }
    assert absent == {"latest": [1], "main": [1], "last": None}


def other_lines(folder: str) -> list[str]:
    accelerator, *_ = prepared()
    messages = Messages()
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/both")
    else:
        accelerator.save_state(f"{folder}/both")
    return messages.about("by the main process alone")


def test_ranks_that_save_to_one_folder_from_different_lines_meet(tmp_path: Path) -> None:
    assert run_on_ranks(other_lines, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS) == [[], []]
    assert (tmp_path / "both" / "random_states_1.json").is_file()


def others_wait(folder: str) -> float:
    accelerator, *_ = prepared()
    call_rendezvous.GRACE_SECONDS = LIMIT_SECONDS  # type: ignore[misc]
    began = time.monotonic()
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    seconds = time.monotonic() - began
    accelerator.wait_for_everyone()
    assert accelerator.reduce(torch.tensor([1.0])).item() == 2
    return seconds


def test_nobody_is_waited_for_who_is_in_another_collective(tmp_path: Path) -> None:
    assert run_on_ranks(others_wait, 2, str(tmp_path / "ck"), timeout_seconds=LIMIT_SECONDS)[0] < LIMIT_SECONDS / 2


def goes_on_alone(kind: str, call: str, folder: str) -> tuple[float, str]:
    options: dict[str, Any] = {
        "fsdp2": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
        "fsdp1": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
        "tensor": {"parallelism_config": ParallelismConfig(tp_size=2)},
    }[kind]
    accelerator = Accelerator(cpu=True, **options)
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    messages = Messages()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.wait_for_everyone()
    began = time.monotonic()
    try:
        if accelerator.is_main_process:
            getattr(accelerator, call)(
                *{"get_state_dict": (model,), "save_model": (model, folder)}.get(call, (folder,))
            )
        for _ in range(50):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
        raise AssertionError("it went on")
    except RuntimeError as error:
        seconds, text = time.monotonic() - began, str(error)
    ended, deadline = Path(f"{folder}-ended"), time.monotonic() + 12
    if not accelerator.is_main_process:
        ended.touch()
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # the others end although this rank still holds its connections
    return seconds, "\n".join([text, *messages.texts])


@pytest.mark.parametrize(
    ("kind", "call"), [("fsdp2", "save_state"), ("fsdp1", "save_model"), ("tensor", "get_state_dict")]
)
def test_a_call_that_needs_every_rank_ends_on_all_when_one_alone_makes_it(tmp_path: Path, kind: str, call: str) -> None:
    for seconds, text in run_on_ranks(
        goes_on_alone, 2, kind, call, str(tmp_path / "ck"), timeout_seconds=LIMIT_SECONDS
    ):
        assert f"`{call}`" in text and "every rank" in text, text
        assert seconds < LIMIT_SECONDS / 2, seconds  # 4 s where nobody else computes


def straggles(folder: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if not accelerator.is_main_process:
        until = time.monotonic() + 7
        weight = torch.ones(64, 64)
        while time.monotonic() < until:
            weight = (weight @ weight).clamp(max=1)
    accelerator.save_state(folder)
    accelerator.save_model(model, f"{folder}-model")


def test_a_rank_that_computes_is_waited_for(tmp_path: Path) -> None:
    run_on_ranks(straggles, 2, str(tmp_path / "ck"), timeout_seconds=LIMIT_SECONDS)
    assert (tmp_path / "ck" / "manifest.json").is_file() and (tmp_path / "ck-model").is_dir()
