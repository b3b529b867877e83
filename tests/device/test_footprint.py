"""Memory and time of the device: estimates, coordinated retries, what is freed, and copies beside computing."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, cpu_offload
from accelerate.big_models import offload, prefetch
from accelerate.guests.estimate.plan import Layout, footprint
from accelerate.guests.estimate.trace import trace_training
from accelerate.utils import FullyShardedDataParallelPlugin
from benchmarks.estimates import LanguageModel, Subject, loss_of
from tests.device.devices import on_devices
from tests.device.test_memory import gradients_in_parts

SHARDED = {
    "fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block",
}  # fmt: skip


def model_of_blocks() -> LanguageModel:
    return LanguageModel(width=256, depth=6)


def peak_of_a_step(plugin: dict[str, Any] | None) -> int:
    accelerator = Accelerator(fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin))
    model = model_of_blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.zeros(2, 32, dtype=torch.long, device=accelerator.device)
    for _ in range(3):
        torch.sim.reset_peak_memory_stats()
        accelerator.backward(loss_of(model(tokens)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.sim.max_memory_allocated()


@pytest.mark.parametrize(("layout", "plugin"), [("ddp", None), ("fsdp", SHARDED)])
def test_a_step_takes_the_memory_that_was_estimated(layout: str, plugin: dict[str, Any] | None) -> None:
    subject = Subject("language model", model_of_blocks, lambda *_: (torch.zeros(2, 32, dtype=torch.long),), 2, 32)
    expected = footprint(trace_training(subject, batch=2, sequence=32, device="cpu"), Layout.parse(layout, 2))
    measured = on_devices(peak_of_a_step, 2, plugin)
    assert 0.75 * max(measured) < expected.peak < 1.15 * max(measured)


def freed() -> list[int]:
    accelerator = Accelerator()
    model = nn.Linear(256, 256)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 256, device=accelerator.device)).sum())
        optimizer.step()
    held = torch.sim.memory_allocated()
    model, optimizer = accelerator.free_memory(model, optimizer)
    deadline = time.monotonic() + 10  # a thread of the process group lets its last tensor go when it gets to it
    while (left := torch.sim.memory_allocated()) > 1024 and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return [held, left]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_free_memory_leaves_nothing_on_the_device(num_ranks: int) -> None:
    for held, left in on_devices(freed, num_ranks):
        assert held > 4 * 256 * 256 * 4
        assert left <= 1024


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_retry_together_where_they_must(sharded: bool) -> None:
    whole = on_devices(gradients_in_parts, 2, None, 256, sharded)
    # Two activations of the whole batch alone are 4 MiB; gradients and gathered weights are 2 MiB at most.
    parts = on_devices(gradients_in_parts, 2, 7 << 19, 256, sharded)
    assert [size for size, *_ in whole] == [256, 256]
    assert parts[1][0] < 256
    assert parts[0][0] == (parts[1][0] if sharded else 256)
    for (_, loss, _gradient), (_, right, _right_gradient) in zip(parts, whole, strict=True):
        assert loss == pytest.approx(right, rel=1e-5)


SECONDS = 0.03  # of a copy, and of a layer


class Slow(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return super().forward(input)


def offloaded_run() -> tuple[float, bool]:
    """How long a run of eight offloaded layers took, and whether its result is right."""
    prefetch.MIN_UNIT_BYTES = offload.MIN_UNIT_BYTES = 0  # type: ignore[misc]
    torch.manual_seed(1)
    model = nn.Sequential(*(Slow(64, 64, bias=False) for _ in range(8))).eval()
    rows = torch.randn(2, 64)
    with torch.no_grad():
        expected = model(rows)
        model = cpu_offload(model, "sim:0")
        given = rows.to("sim:0")
        model(given)  # records the order
        torch.sim.set_copy_delay(int(SECONDS * 1e6))
        begin = time.monotonic()
        found = model(given)
        torch.sim.synchronize()
        taken = time.monotonic() - begin
        torch.sim.set_copy_delay(0)
    return taken, torch.equal(found.cpu(), expected)


def test_offloaded_weights_are_copied_beside_computing() -> None:
    ((taken, is_right),) = on_devices(offloaded_run)
    assert is_right
    assert 8 * SECONDS < taken < 8 * 2 * SECONDS
