"""Training on torch_xla's CPU device for real, on one of four virtual devices and over all of them, equals one CPU
process. `make xla` runs it in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla isn't installed: make xla"),
    pytest.mark.timeout(600),  # compiling takes as long as the machine is busy
]

PROGRAM = Path(__file__).with_name("program.py")
SOURCE = PROGRAM.parents[2] / "src"
NUM_DEVICES = 4


def run(mode: str, *options: str, num_devices: int = NUM_DEVICES) -> dict[str, Any]:
    """What a run of `program.py` told; each is a process, because a process has one way of using devices."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices), "PYTHONPATH": str(SOURCE)}
    environment.pop("XLA_USE_SPMD", None)
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), mode, *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@cache
def trained(mode: str, *options: str) -> dict[str, Any]:
    """The same, once for all tests."""
    return run(mode, *options)


def assert_same(told: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses, norms and final weights agree."""
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(told[name]), torch.tensor(reference[name]), rtol=tolerance, atol=tolerance
        )
    assert list(told["weights"]) == list(reference["weights"])
    for name, value in reference["weights"].items():
        torch.testing.assert_close(
            torch.tensor(told["weights"][name]), torch.tensor(value), rtol=10 * tolerance, atol=10 * tolerance, msg=name
        )


@pytest.mark.parametrize("mode", ["one", "spmd", "fsdp"])
def test_training_equals_one_cpu_process(mode: str) -> None:
    """With accumulation, clipping, a schedule, shuffling, a short last batch and tied weights."""
    told = trained(mode)
    assert (told["device"], told["type"]) == ("xla:0", "XLA")
    assert told["is_tied"]
    assert_same(told, trained("cpu"))


def test_parameters_lie_over_all_devices_under_fsdp_only() -> None:
    assert "devices=[4,1]" in trained("fsdp")["sharding"]
    assert "devices" not in trained("spmd")["sharding"]


@pytest.mark.parametrize("mode", ["one", "spmd", "fsdp"])
def test_a_step_is_compiled_once(mode: str) -> None:
    """Programs for a micro-batch, an update, their first times, and the short last batch; not one for each step."""
    assert trained(mode)["programs"] <= 16


def test_bf16_is_bf16() -> None:
    told, exact = trained("one", "--precision", "bf16"), trained("cpu")
    assert told["losses"] != exact["losses"]
    assert told["losses"] == pytest.approx(exact["losses"], rel=3e-2)


@pytest.mark.parametrize("mode", ["one", "fsdp"])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(mode: str, tmp_path: Path) -> None:
    """Mid-epoch, with the order of the shuffled loader; and the same state goes on on a CPU."""
    run(mode, "--task", "save", "--folder", str(tmp_path))
    whole = trained(mode)
    for reader in (mode, "cpu"):
        resumed = run(reader, "--task", "load", "--folder", str(tmp_path))
        assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)
        assert_same({**resumed, "losses": [], "norms": []}, {**whole, "losses": [], "norms": []})


def test_fsdp_after_the_devices_were_used_is_refused() -> None:
    code = (
        "import torch_xla; torch_xla.device()\n"
        "from accelerate import Accelerator\n"
        "from accelerate.utils import FullyShardedDataParallelPlugin\n"
        "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))\n"
    )
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "PYTHONPATH": str(SOURCE)}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert finished.returncode != 0 and "Make the Accelerator before" in finished.stderr


def told_by(*words: str, num_devices: int = 1) -> str:
    """The last line that a Python program of those words printed."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices), "PYTHONPATH": str(SOURCE)}
    finished = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.splitlines()[-1]


@pytest.mark.parametrize("module", ["accelerate.commands.launch", "accelerate.guests.xla.launcher"])
def test_the_launcher_calls_the_function_of_the_script_on_the_device(module: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def train():\n"
        "    import torch\n"
        "    from accelerate import Accelerator\n"
        "    run = Accelerator()\n"
        "    model = run.prepare(torch.nn.Linear(2, 1))\n"
        "    print(run.device, run.num_processes, model.weight.device.type, flush=True)\n"
    )
    options = ["--tpu", "--main_training_function", "train"] if "commands" in module else ["--function", "train"]
    assert told_by("-m", module, *options, "--num_processes", "1", str(script)) == "xla:0 1 xla"


def test_the_device_is_found_and_seeded() -> None:
    code = (
        "import torch\n"
        "from accelerate.utils import is_torch_xla_available as found, set_seed\n"
        "drawn = []\n"
        "for _ in range(2):\n"
        "    set_seed(3)\n"
        "    drawn.append(torch.rand(4, device='xla').tolist())\n"
        "print(found(), found(check_is_tpu=True), drawn[0] == drawn[1])\n"
    )
    assert told_by("-c", code) == "True False True"
