"""Every row of the devices table, on a machine that has none of them: with a torch module made of recorders."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from accelerate.devices import table as devices
from accelerate.devices.table import CPU, KINDS, DeviceKind, available_kind, count_devices, kind_of, present

VENDORS = [kind for kind in KINDS if kind is not CPU]
CALLS = {
    "is_available": True,
    "device_count": 3,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "manual_seed_all": None,
    "manual_seed": None,
    "get_rng_state_all": ["one", "two"],
    "get_rng_state": "one",
    "set_rng_state_all": None,
    "set_rng_state": None,
    "memory_allocated": 10,
    "current_allocated_memory": 10,
    "max_memory_allocated": 20,
    "reset_peak_memory_stats": None,
    "mem_get_info": (30, 40),
    "recommended_max_memory": 40,
    "is_bf16_supported": True,
    "addressable_runtime_device_count": 3,
    "wait_device_ops": None,
    "current_device": 1,
}


class FakeModule(types.ModuleType):
    """Answers like a vendor's module, and remembers what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.asked = asked

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return CALLS[name]

        return answer


def install(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The modules that the row names exist; returns what they are asked."""
    asked: list[tuple[str, tuple[Any, ...]]] = []
    dotted = {kind.module, kind.extension, kind.extension.partition(".")[0]}
    dotted |= {
        call.rpartition(":")[0]
        for call in (kind.available, kind.count, kind.wait, kind.seed_call, kind.rng_read)
        if ":" in call
    }
    for name in sorted(dotted - {"", "torch"}):
        module = FakeModule(name, asked)
        monkeypatch.setitem(sys.modules, name, module)
        if name.startswith("torch.") and name.count(".") == 1:
            monkeypatch.setattr(torch, name.removeprefix("torch."), module, raising=False)
    return asked


def test_the_order_is_the_documented_one() -> None:
    names = [kind.name for kind in KINDS]
    assert names == ["xla", "mps", "mlu", "sdaa", "musa", "npu", "hpu", "cuda", "xpu", "neuron", "cpu"]


def test_labels_and_backends_are_the_documented_ones() -> None:
    rows = {kind.name: (kind.label, kind.backend) for kind in KINDS}
    assert rows["cuda"] == ("MULTI_GPU", "nccl")
    assert rows["cpu"] == ("MULTI_CPU", "gloo")
    assert rows["xpu"] == ("MULTI_XPU", "xccl")
    assert rows["npu"] == ("MULTI_NPU", "hccl")
    assert rows["hpu"] == ("MULTI_HPU", "hccl")
    assert rows["mlu"] == ("MULTI_MLU", "cncl")
    assert rows["sdaa"] == ("MULTI_SDAA", "tccl")
    assert rows["musa"] == ("MULTI_MUSA", "mccl")


@pytest.mark.parametrize("kind", VENDORS, ids=lambda kind: kind.name)
def test_a_row_without_its_vendor_is_absent_and_harmless(kind: DeviceKind) -> None:
    assert kind.is_available() is False
    assert kind.device_count() == 0
    assert kind.count_without_torch({}) in (0, None)


@pytest.mark.parametrize("kind", VENDORS, ids=lambda kind: kind.name)
def test_every_row_speaks_to_its_vendor(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(kind, monkeypatch)
    if kind.name == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert kind.is_available()
    kind.synchronize()
    kind.empty_cache()
    kind.manual_seed(7)
    states = kind.rng_states()
    kind.set_rng_states(states)
    assert states == (["one", "two"] if kind.rng_is_list else ["one"])
    assert kind.memory_allocated() == (10 if kind.memory_used else 0)
    assert kind.max_memory_allocated(0) == (20 if kind.memory_peak else 0)
    assert kind.total_memory() == (40 if kind.memory_left else None)
    assert kind.free_memory() == (30 if kind.memory_left == "mem_get_info" else None)
    names = [name for name, _ in asked]
    for call in (kind.wait, kind.clear, kind.seed_call, kind.rng_read, kind.rng_write):
        if call:
            assert call.rpartition(":")[2] in names
    assert next(arguments for name, arguments in asked if name == kind.seed_call.rpartition(":")[2])[-1] in (7, "one")


@pytest.mark.parametrize("kind", [k for k in VENDORS if k.name not in ("mps", "xla")], ids=lambda kind: kind.name)
def test_an_installed_vendor_is_the_kind_that_is_used(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install(kind, monkeypatch)
    assert available_kind() is kind
    assert available_kind(cpu=True) is CPU
    assert kind.device_count() == 3
    kind.set_device(torch.device("cpu"))
    assert ("set_device", (torch.device("cpu"),)) in asked


def test_the_cpu_row_answers_without_asking_anybody() -> None:
    assert CPU.is_available()
    assert CPU.device() == torch.device("cpu")
    assert CPU.device(3) == torch.device("cpu")
    assert CPU.rng_states() == []
    assert (CPU.memory_allocated(), CPU.free_memory(), CPU.total_memory()) == (0, None, None)
    assert CPU.supports_bf16()
    assert CPU.supports_fp16()
    CPU.synchronize()
    CPU.empty_cache()


def test_kind_of_takes_devices_and_words_and_refuses_others() -> None:
    assert kind_of("cuda:1").name == "cuda"
    assert kind_of(torch.device("cpu")) is CPU
    with pytest.raises(ValueError, match="'tpu9' is no device that is known here"):
        kind_of("tpu9")


def test_xla_is_switched_off_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    install(kind_of("xla"), monkeypatch)
    assert kind_of("xla").is_available()
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert not kind_of("xla").is_available()


def test_importing_the_table_and_counting_needs_no_torch() -> None:
    program = (
        "import sys; from accelerate.devices.table import present, count_devices; present(); count_devices('cuda');"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert finished.stdout.strip() == "False"


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for index in range(8):
        (tmp_path / f"0000:0{index}").mkdir()
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [str(p) for p in tmp_path.iterdir()])
    monkeypatch.setattr(devices, "_torch_build", lambda: {"cuda": "12.8", "hip": None})


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 8),
        ("", 0),
        ("0", 1),
        ("0,3", 2),
        ("-1", 0),
        ("0,-1,2", 1),
        ("0,9,1", 1),
        ("GPU-8a1f,GPU-77bc", 2),
        ("all", 8),
    ],
)
@pytest.mark.usefixtures("eight_gpus")
def test_the_driver_is_counted_as_far_as_the_variable_lets_it(visible: str | None, expected: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_devices("cuda", environment) == expected
    assert present(environment) == ((kind_of("cuda"), expected) if expected else (CPU, 1))


@pytest.mark.usefixtures("eight_gpus")
def test_a_torch_without_the_device_counts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_build", lambda: {"cuda": None, "hip": None})
    assert count_devices("cuda", {}) == 0


def test_what_the_driver_cant_tell_is_asked_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def child(kind: DeviceKind, environment: Any) -> int:
        asked.append(kind.name)
        return 4

    monkeypatch.setattr(devices, "_torch_build", lambda: {"cuda": None, "hip": "6.4", "xpu": None})
    monkeypatch.setattr(devices, "_count_in_child", child)
    assert count_devices("cuda", {}) == 4
    assert asked == ["cuda"]


def test_a_command_counts_its_unindented_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "GPU 0: H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0\nGPU 1: H100 (UUID: GPU-2)\n"
    finished = subprocess.CompletedProcess(["nvidia-smi", "-L"], 0, stdout=text)
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: finished)
    assert devices._num_lines("nvidia-smi -L") == 2
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: (_ for _ in ()).throw(FileNotFoundError()))
    assert devices._num_lines("nvidia-smi -L") == 0


def test_torch_version_is_read_without_importing_it() -> None:
    build = importlib.import_module("torch.version")
    assert devices._torch_build()["cuda"] == build.cuda
    assert devices._torch_build()["__version__"] == str(torch.__version__)


def test_a_tensor_on_an_xpu_is_known_by_its_device() -> None:
    assert devices.is_torch_xpu_tensor(types.SimpleNamespace(device=torch.device("xpu", 0)))
    assert not devices.is_torch_xpu_tensor(torch.zeros(1))
    assert not devices.is_torch_xpu_tensor("xpu")
