"""Counting devices, choosing them for processes, and starting processes from one that has used a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.device.devices import on_devices
from tests.python_path import python_path

ROOT = Path(__file__).parents[2]


def counts(visible: str | None) -> tuple[int, int]:
    from accelerate.devices.table import kind_of

    environment = {"SIM_DEVICES": "4", **({} if visible is None else {"SIM_VISIBLE_DEVICES": visible})}
    os.environ.update(environment)
    from tests.device.sim import module

    module.set_device_count(module.count_devices())
    return kind_of("sim").device_count(), torch.sim.device_count()


def test_the_variable_of_visible_devices_counts() -> None:
    assert on_devices(counts, 1, None) == [(4, 4)]
    assert on_devices(counts, 1, "1,3") == [(2, 2)]


def devices_of_ranks() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    everyone = accelerator.gather(torch.tensor([torch.sim.current_device()], device=accelerator.device))
    return {
        "device": str(accelerator.device),
        "all": everyone.cpu().tolist(),
        "type": str(accelerator.distributed_type),
    }


def test_each_rank_has_a_device_of_its_own() -> None:
    found = on_devices(devices_of_ranks, 4)
    assert [one["device"] for one in found] == [f"sim:{rank}" for rank in range(4)]
    assert all(one["all"] == [0, 1, 2, 3] for one in found)


NOTEBOOK = """
import sys
from tests.device import sim

sim.start()
import torch
from accelerate import notebook_launcher


def train():
    from tests.device import sim

    sim.start()
    from accelerate import Accelerator

    print(f"rank {{Accelerator().process_index}}\\n", end="", flush=True)  # in one piece: ranks write at once


{first}
try:
    notebook_launcher(train, num_processes=2, use_port="0")
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def output_of(first: str) -> str:
    environment = {**os.environ, "SIM_DEVICES": "2", "PYTHONPATH": python_path(ROOT)}
    environment.pop("ACCELERATE_USE_CPU", None)
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK.format(first=first)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_notebook_starts_ranks_with_devices() -> None:
    output = output_of("")
    assert "rank 0" in output and "rank 1" in output, output


def test_a_notebook_that_has_used_the_device_starts_fresh_interpreters() -> None:
    output = output_of('torch.ones(1, device="sim")')
    assert "rank 0" in output and "rank 1" in output, output


SCRIPT = """
import json, os
from tests.device import sim

sim.start()
from accelerate import Accelerator

accelerator = Accelerator()
print(json.dumps([accelerator.process_index, accelerator.num_processes, str(accelerator.device),
                  os.environ.get("SIM_VISIBLE_DEVICES")]), flush=True)
"""


def test_launched_ranks_take_the_devices(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "SIM_DEVICES": "2", "PYTHONPATH": python_path(ROOT)}
    environment.pop("ACCELERATE_USE_CPU", None)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", str(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    lines = [json.loads(line[line.index("[") :]) for line in done.stdout.splitlines() if line.rstrip().endswith("]")]
    assert sorted(lines) == [[0, 2, "sim:0", None], [1, 2, "sim:1", None]], done.stdout + done.stderr
