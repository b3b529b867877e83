"""A run that trains without having loaded its project's checkpoint is told so, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from accelerate import Accelerator
from accelerate.torch_private.modules import step_hooks
from accelerate.utils import ProjectConfiguration


def run_in(folder: Path, form: Literal["safe", "classic"] = "safe") -> tuple[Accelerator, torch.nn.Module, list[Any]]:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(folder), checkpoint_format=form))
    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.AdamW([one], lr=0.1) for one in model.parameters()]
    prepared: Any = accelerator.prepare(model, *optimizers)
    return accelerator, prepared[0], list(prepared[1:])


def train(accelerator: Accelerator, model: torch.nn.Module, optimizers: list[Any]) -> None:
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def told(caplog: pytest.LogCaptureFixture, optimizers: list[Any]) -> int:
    assert all(not before for before, _ in (step_hooks(one.optimizer) for one in optimizers)), "a step pays nothing"
    return caplog.text.count("makes its first update without load_state()")


@pytest.mark.parametrize("name", ["checkpoint-2", "last"])
@pytest.mark.parametrize("loads", ["nothing", "load_state", "weights", "resume"])
def test_a_run_that_trains_without_its_project_s_checkpoint_is_told_once(
    loads: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    train(*run)
    run[0].save_state(tmp_path / name)
    assert told(caplog, run[2]) == 0  # a new run
    run = run_in(tmp_path)
    if loads == "load_state":
        run[0].load_state(tmp_path / name)
    elif loads == "weights":
        run[0].load_state(tmp_path / name, model_only=True)
    elif loads == "resume":
        run[0].resume(tmp_path)
    train(*run)
    assert told(caplog, run[2]) == (loads == "nothing")
    assert (f"although {tmp_path / name} is there" in caplog.text) == (loads == "nothing")


def test_nothing_is_said_beside_checkpoints_that_have_the_older_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path, "classic")
    train(*run)
    run[0].save_state(tmp_path / "checkpoint-2")
    torch.load(tmp_path / "checkpoint-2" / "optimizer.bin")  # the program that is meant finds it
    run = run_in(tmp_path, "classic")
    train(*run)
    assert told(caplog, run[2]) == 0
