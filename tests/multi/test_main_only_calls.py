"""Calls that the main process makes alone, many times from one line: what late ranks, the store and the clock see."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.distributed import call_rendezvous as rendezvous
from accelerate.distributed.world import current_world
from tests.multi.test_main_only import Messages, prepared, step
from tests.ranks import run_on_ranks

LIMIT_SECONDS = 60.0
KEPT_CALLS = 16  # instead of 64
NUM_SAVES = 50


class Configured(nn.Linear):
    config = {"size": 1}


def saves_models(folder: str, call: str) -> bool:
    """Whether the last of the models, which all ranks save, was there when the call returned."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(Configured(1, 1))
    for number in range(4):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        if number == 3 and accelerator.is_main_process:
            time.sleep(1.0)  # the others come first
        if number == 3 or accelerator.is_main_process:
            getattr(accelerator, call)(model, f"{folder}/{number}")
    found = Path(folder, "3", "model.safetensors").exists()
    accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("call", ["save_model", "export_model"])
def test_a_rank_that_comes_later_is_told_of_the_call_that_it_makes(tmp_path: Path, call: str) -> None:
    assert run_on_ranks(saves_models, 2, str(tmp_path), call, timeout_seconds=LIMIT_SECONDS) == [True, True]


def num_keys() -> int:
    world = current_world()
    assert world is not None and world.coordinator is not None
    return world.coordinator.store.num_keys()


def saves_often(folder: str, call: str, renames: bool) -> list[int]:
    """The keys in the store after half of the saves and after all; then every rank makes the call."""
    rendezvous.KEPT_CALLS = KEPT_CALLS  # type: ignore[misc]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(nn.Linear(1, 1))
    counts: list[int] = []
    for number in range(NUM_SAVES + 1):
        target = f"{folder}/{number if renames else 0}"
        if number == NUM_SAVES:
            accelerator.wait_for_everyone()
        if number == NUM_SAVES or accelerator.is_main_process:
            accelerator.save_model(model, target) if call == "save_model" else accelerator.save_state(target)
        if number in (NUM_SAVES // 2, NUM_SAVES - 1) and accelerator.is_main_process:
            counts.append(num_keys())
    assert any(Path(folder, str(NUM_SAVES if renames else 0)).iterdir())
    accelerator.wait_for_everyone()
    return counts


@pytest.mark.parametrize("call", ["save_model", "save_state"])
@pytest.mark.parametrize("renames", [False, True], ids=["one target", "a target each"])
def test_the_store_keeps_so_many_calls_and_no_more(tmp_path: Path, call: str, renames: bool) -> None:
    half, whole = run_on_ranks(saves_often, 2, str(tmp_path), call, renames, timeout_seconds=LIMIT_SECONDS)[0]
    assert whole <= half + 2  # what the other rank is saying just now
    assert whole < 6 * KEPT_CALLS + 40


def saves_together(folder: str) -> int:
    rendezvous.KEPT_CALLS = KEPT_CALLS  # type: ignore[misc]
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(f"{folder}/first")
    counts: list[int] = []
    for number in range(2 * KEPT_CALLS):
        accelerator.save_state(f"{folder}/{number}")
        counts.append(num_keys())
    accelerator.wait_for_everyone()
    return counts[-1] - counts[KEPT_CALLS + 1]


def test_neither_do_calls_of_all_ranks_stay_in_the_store(tmp_path: Path) -> None:
    grown, _ = run_on_ranks(saves_together, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS)
    assert grown <= 2  # what the other rank is saying just now


def saves_unwatched(folder: str) -> tuple[float, list[str], int]:
    rendezvous.UNWATCHED_SECONDS, rendezvous._WARNING_SECONDS = 3.0, 1.0  # type: ignore[misc]
    accelerator, model, optimizer, loader = prepared()
    world = current_world()
    assert world is not None and world.coordinator is not None
    if world.coordinator.watch is not None:
        world.coordinator.watch.sees_backward = False  # as on a device, whose collectives the host doesn't wait in
    messages, num_steps = Messages(), 0
    began = seconds = 0.0
    for number, rows in enumerate(loader):
        if number == 0 or (number == 2 and accelerator.is_main_process):
            began = time.monotonic()
            accelerator.save_state(f"{folder}/{number}")
        step(accelerator, model, optimizer, rows)
        num_steps += 1
        if number == 2:
            seconds = time.monotonic() - began
    accelerator.wait_for_everyone()
    return seconds, messages.about("waits for the other ranks, which made this call the last time"), num_steps


@pytest.mark.parametrize("environment", [{"ACCELERATE_HANG_SECONDS": "0"}, {}], ids=["no watch", "a device's watch"])
def test_where_the_watch_finds_nothing_out_the_main_process_says_what_it_waits_for_and_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    main, other = run_on_ranks(
        saves_unwatched, 2, str(tmp_path), timeout_seconds=LIMIT_SECONDS, environment=environment
    )
    assert 3 <= main[0] < 20 and len(main[1]) == 1 and "save_state" in main[1][0]
    assert main[2] == other[2] == 8 and (tmp_path / "2" / "manifest.json").exists()
