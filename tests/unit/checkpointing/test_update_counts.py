"""The number of updates that each optimizer has made goes on after a checkpoint; listings show the most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import list_checkpoints


def updated(folder: Path, *updates: int) -> tuple[Accelerator, list[Any]]:
    """A run in which each optimizer has made so many updates."""
    run = Accelerator(cpu=True, project_dir=folder)
    optimizers: list[Any] = []
    for count in updates:
        model = torch.nn.Linear(2, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizers.append(optimizer)
        for _ in range(count):
            run.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert [optimizer.num_updates for optimizer in optimizers] == list(updates)
    return run, optimizers


@pytest.mark.parametrize("told, expected", [(True, (2, 6)), (False, (6, 6))])
def test_each_optimizer_goes_on_from_its_own_count(told: bool, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Checkpoints of before have one number for all."""
    run, _ = updated(tmp_path, 2, 6)
    folder = Path(run.save_state(str(tmp_path / "checkpoint_0")))
    if not told:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["details"]["optimizer_updates"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [6]
    run, optimizers = updated(tmp_path, 0, 0)
    run.load_state(str(folder))
    assert tuple(optimizer.num_updates for optimizer in optimizers) == expected


@pytest.mark.parametrize("own", ["of 10", 40, None])
def test_details_of_the_program_stay_as_they_are(own: object, tmp_path: Path) -> None:
    """Also one that is called as a number of ours, beside which listings and resumption have the true one."""
    run, _ = updated(tmp_path, 3)
    folder = Path(run.save_state(str(tmp_path / "checkpoint_0"), details={"updates": own} if own else None))
    details = json.loads((folder / "manifest.json").read_text())["details"]
    assert details["updates"] == (own or 3) and details["optimizer_updates"] == [3]
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [3]
    run, (optimizer,) = updated(tmp_path, 0)
    run.load_state(str(folder))
    assert optimizer.num_updates == 3
