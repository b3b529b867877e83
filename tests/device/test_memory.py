"""Device memory: out-of-memory, models over several devices, offload, background saves, what is reported."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model, find_executable_batch_size
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, get_max_memory, set_seed
from tests.device.devices import on_devices


def largest_batch() -> list[int]:
    torch.sim.set_memory_limit(4 << 20)
    accelerator = Accelerator()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=1024)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        model = accelerator.prepare(nn.Linear(256, 256))
        rows = torch.ones(batch_size, 256, device=accelerator.device)
        for _ in range(3):
            rows = model(rows).relu()
        rows.sum().backward()
        return batch_size

    fits = train()
    return [*tried, fits]


def test_the_batch_size_shrinks_at_a_real_out_of_memory_error() -> None:
    *tried, fits = on_devices(largest_batch)[0]
    assert tried[0] == 1024 and len(tried) > 2
    assert all(after < before for before, after in pairwise(tried))
    assert fits == tried[-1] > 0


def gradients_in_parts(
    limit: int | None, num_rows: int = 64, sharded: bool = False
) -> tuple[int, float, torch.Tensor | None]:
    """The smallest part that a rank computed, the loss, and a gradient; the last rank has ``limit`` bytes left."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(1)
    plain = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1))
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows = torch.randn(num_rows, 64).to(accelerator.device)
    torch.sim.synchronize()
    if limit is not None and accelerator.is_last_process:
        torch.sim.set_memory_limit(torch.sim.memory_allocated() + limit)
    sizes: list[int] = []

    def compute(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return model(part).square().mean()

    loss = accelerator.backward_in_parts(compute, rows)
    return min(sizes), float(loss), None if sharded else plain[0].weight.grad.cpu()


def test_a_batch_that_doesnt_fit_is_computed_in_parts() -> None:
    whole = on_devices(gradients_in_parts, 1, None)[0]
    parts = on_devices(gradients_in_parts, 1, 3 << 19)[0]
    assert whole[0] == 64 > parts[0]
    assert abs(whole[1] - parts[1]) < 1e-6
    assert torch.allclose(whole[2], parts[2], atol=1e-6)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(self.second(self.first(rows).relu()).relu()).relu())


def spread_outputs(folder: str) -> dict[str, Any]:
    torch.sim.set_copy_delay(5_000)  # what is used before it has arrived is NaN
    rows = torch.randn(3, 64)
    found: dict[str, Any] = {}

    def fresh() -> nn.Module:
        torch.manual_seed(2)
        return Blocks().eval()

    with torch.no_grad():
        expected = fresh()(rows)
        maps = {
            "two devices": {"first": 0, "second": 0, "third": 1, "last": 1},
            "device and host": {"first": 0, "second": "cpu", "third": "cpu", "last": 0},
            "device and disk": {"first": 0, "second": "disk", "third": "cpu", "last": 0},
        }
        for name, device_map in maps.items():
            model = dispatch_model(fresh(), device_map, offload_dir=f"{folder}/{name}")
            for _ in range(3):
                found[name] = torch.equal(model(rows.to("sim:0")).cpu(), expected)
        found["offloaded"] = torch.equal(cpu_offload(fresh(), "sim:0")(rows.to("sim:0")).cpu(), expected)
        found["on disk"] = torch.equal(
            disk_offload(fresh(), f"{folder}/all", "sim:0")(rows.to("sim:0")).cpu(), expected
        )
    return found


def test_models_over_devices_host_and_disk_compute_the_same(tmp_path: Path) -> None:
    found = on_devices(spread_outputs, 1, str(tmp_path), num_devices=2)[0]
    assert found == dict.fromkeys(found, True) and len(found) == 5


def most_memory() -> dict[Any, int]:
    torch.sim.set_memory_limit(256 << 20, 0)
    torch.sim.set_memory_limit(128 << 20, 1)
    return get_max_memory()


def test_max_memory_counts_the_devices() -> None:
    found = on_devices(most_memory, num_devices=2)[0]
    assert set(found) == {0, 1, "cpu"}
    assert 128 << 20 < found[0] <= 256 << 20 and 64 << 20 < found[1] <= 128 << 20


def saved_in_the_background(folder: str) -> list[bool]:
    torch.sim.set_copy_delay(20_000)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, save_asynchronously=True)
    accelerator = Accelerator(project_config=project)
    set_seed(4)
    model = nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    data = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=2)
    (data,) = [accelerator.prepare(data)]
    at_save: dict[int, torch.Tensor] = {}
    for step, (rows,) in enumerate(data):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 3):
            at_save[len(at_save)] = model.weight.detach().cpu().clone()
            accelerator.save_state()
    accelerator.wait_for_checkpoint()
    same = []
    for number, weight in at_save.items():
        accelerator.load_state(f"{folder}/checkpoints/checkpoint_{number}")
        same.append(torch.equal(model.weight.detach().cpu(), weight))
    return same


def test_a_background_save_holds_the_moment_of_the_call(tmp_path: Path) -> None:
    assert on_devices(saved_in_the_background, 1, str(tmp_path)) == [[True, True]]
