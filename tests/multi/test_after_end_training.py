"""`end_training` ends what a run logs and writes; every other call works after it, on one rank and on two."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing.series import inspect
from accelerate.errors import CollectiveError
from tests.multi.test_equal_draws import calls, public_methods
from tests.ranks import run_on_ranks

#: What is refused on plain replicas, before the end and after it.
REFUSED = {"deepspeed_ulysses_dl_adapter", "lomo_backward", "pipeline_step"}


def called_after_the_end(folder: Path) -> dict[str, str]:
    """Make every public call after `end_training`, on objects prepared before it; return what each raised."""
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    steps: dict[str, Callable[[], Any]] = calls(accelerator, folder)
    for name in ("prepare", "backward", "prepared.step", "init_trackers", "log", "end_training"):
        steps[name]()
    model = accelerator._models[0]
    more: dict[str, Callable[[], Any]] = {
        "save_state on the main process": lambda: (
            accelerator.save_state(folder / "alone") if accelerator.is_main_process else None
        ),
        "load_state": lambda: accelerator.load_state(str(folder / "state")),
        "resume": lambda: accelerator.resume(str(folder / "state")),
        "backward_in_parts": lambda: accelerator.backward_in_parts(lambda part: model(part).sum(), torch.ones(2, 2)),
        "another Accelerator": lambda: Accelerator(cpu=True).wait_for_everyone(),
    }
    before_memory_is_freed = ("free_memory", "clear")
    order = [name for name in steps if name not in before_memory_is_freed]
    failed: dict[str, str] = {}
    for name in [*order, *more, *before_memory_is_freed]:
        try:
            {**steps, **more}[name]()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert ({*steps, *more} | REFUSED) >= public_methods() >= REFUSED
    return failed


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_public_call_works_after_end_training(num_processes: int, tmp_path: Path) -> None:
    assert run_on_ranks(called_after_the_end, num_processes, tmp_path, timeout_seconds=240) == [{}] * num_processes
    assert (tmp_path / "alone").is_dir()


def saved_when_the_others_have_ended(folder: Path) -> float:
    """All ranks end training, and the main process alone saves its final state, as sd-scripts does."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    accelerator.end_training()
    pids = accelerator.gather_for_metrics([os.getpid()], use_gather_object=True)
    if not accelerator.is_main_process:
        return 0.0
    until = time.monotonic() + 30
    while psutil.pid_exists(pids[1]) and psutil.Process(pids[1]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the other rank hasn't ended"
        time.sleep(0.01)
    began = time.monotonic()
    accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")
    return time.monotonic() - began


def test_the_main_process_saves_its_final_state_when_the_others_have_ended(tmp_path: Path) -> None:
    seconds, _ = run_on_ranks(saved_when_the_others_have_ended, 2, tmp_path)
    assert seconds < 10
    saved = inspect(tmp_path / "state", contents=True)
    assert saved.problem is None and saved.manifest is not None and "optimizer.safetensors" in saved.manifest.files
    assert (tmp_path / "model" / "model.safetensors").is_file()


def gradients_after_the_end() -> tuple[torch.Tensor, float]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    accelerator.end_training()
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    gradient = next(model.parameters()).grad
    assert gradient is not None
    total = accelerator.reduce(torch.ones(1)).item()
    return gradient, total


def test_gradients_are_averaged_after_end_training_as_before_it() -> None:
    assert run_on_ranks(gradients_after_the_end, 2) == [(torch.tensor([[0.5]]), 2.0)] * 2


def errors_after_destruction(folder: Path, by_torch: bool) -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.end_training()
    torch.distributed.destroy_process_group() if by_torch else accelerator.state.destroy_process_group()
    made: dict[str, Callable[[], Any]] = {
        "save_model": lambda: accelerator.save_model(model, folder / "weights"),
        "gather": lambda: accelerator.gather(torch.ones(1)),
        "load_state": lambda: accelerator.load_state(str(folder)),
        "end_training": accelerator.end_training,
    }
    if accelerator.is_main_process:  # without a group, it saves alone
        made["save_state"] = lambda: accelerator.save_state(folder)
    failed: dict[str, str] = {}
    for name, call in made.items():
        try:
            call()
        except CollectiveError as error:
            failed[name] = str(error)
    return failed


@pytest.mark.parametrize("by_torch", [False, True])
def test_after_the_group_is_destroyed_collectives_say_so_and_the_main_process_saves(
    by_torch: bool, tmp_path: Path
) -> None:
    for failed in run_on_ranks(errors_after_destruction, 2, tmp_path, by_torch):
        assert set(failed) == {"gather", "load_state"}
        assert all("destroy_process_group" in text for text in failed.values())
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "weights").is_dir()
