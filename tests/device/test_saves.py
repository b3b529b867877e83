"""Background saves: a snapshot stops training for its copy only, and holds the moment of the call."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, dispatch_model
from accelerate.checkpointing import background
from accelerate.utils import ProjectConfiguration, set_seed
from tests.device.devices import on_devices
from tests.device.test_training import accelerator_for

SLOW_WRITE_SECONDS = 1.0


def saved_slowly(folder: str, kind: str, safe: bool) -> dict[str, Any]:
    """A save whose writing takes long: what training waited for, and what was saved."""
    # Torch's FSDP 1, of parameters in a stream of its own.
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, save_asynchronously=True)
    accelerator = accelerator_for(kind, project_config=project)
    set_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    rows = torch.randn(4, 8).to(accelerator.device)

    def step() -> None:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> list[torch.Tensor]:
        return [value.detach().cpu().clone() for value in _local(model)]

    step()
    accelerator.save_state(safe_serialization=safe)  # allocates pinned memory
    accelerator.wait_for_checkpoint()
    step()
    at_save = weights()
    written = threading.Event()
    run = background.Background._run

    def run_slowly(self: Any, save: Any) -> None:
        time.sleep(SLOW_WRITE_SECONDS)
        run(self, save)
        written.set()

    background.Background._run = run_slowly  # type: ignore[method-assign]
    torch.sim.set_copy_delay(2_000)
    with torch.sim.counting() as counted:
        start = time.monotonic()
        accelerator.save_state(safe_serialization=safe)
        stopped = time.monotonic() - start
    torch.sim.set_copy_delay(0)
    for _ in range(2):
        step()
    was_written = written.is_set()
    accelerator.wait_for_checkpoint()
    later = weights()
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
    return {
        "stopped": stopped, "written": was_written, "counted": counted,
        "as it was": all(map(torch.equal, weights(), at_save)), "moved on": not all(map(torch.equal, later, at_save)),
    }  # fmt: skip


def _local(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(value, "_local_tensor", value) for value in model.parameters()]


FORMS = {
    "one, safe": (1, "one", True), "one, classic": (1, "one", False), "ddp": (2, "ddp", True),
    "fsdp1 shards": (2, "fsdp1 shards", True), "fsdp2 shards": (2, "fsdp2 shards", True),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_slow_write_stops_nothing(form: str, tmp_path: Path) -> None:
    num_ranks, kind, safe = FORMS[form]
    for rank, found in enumerate(on_devices(saved_slowly, num_ranks, str(tmp_path), kind, safe)):
        assert found["stopped"] < SLOW_WRITE_SECONDS and not found["written"]
        assert found["as it was"] and found["moved on"]
        if kind != "ddp" or rank == 0:  # rank 0 saves for all
            assert found["counted"]["asynchronous_copies"] >= 4


def saved_from_two_devices(folder: str) -> list[bool]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, save_asynchronously=True)
    accelerator = Accelerator(project_config=project)
    set_seed(4)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model = dispatch_model(model, {"0": 0, "1": 1, "2": 1})
    model = accelerator.prepare(model)
    expected = [value.detach().cpu() for value in model.parameters()]
    accelerator.save_state()  # allocates
    accelerator.wait_for_checkpoint()
    torch.sim.set_copy_delay(100_000)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)
    accelerator.save_state()
    accelerator.wait_for_checkpoint()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    torch.sim.set_copy_delay(0)
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
    found = [value.detach().cpu() for value in model.parameters()]
    return [torch.equal(value, right + 1) for value, right in zip(found, expected, strict=True)]


def test_a_snapshot_waits_for_each_device(tmp_path: Path) -> None:
    assert on_devices(saved_from_two_devices, 1, str(tmp_path), num_devices=2) == [[True] * 6]
