"""What a driver says, told by recorded answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelerate.devices import hardware
from accelerate.devices.table import DeviceKind, kind_of
from accelerate.errors import NotBuilt


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A host whose driver gives these answers."""
    answers = {
        "name": ["NVIDIA GeForce RTX 4090"] * 2,
        "driver_version": ["535.54.03"] * 2,
        "pci.bus_id": ["00000000:17:00.0", "00000000:CA:00.0"],
    }
    monkeypatch.setattr(hardware, "_query", lambda column: answers[column])
    monkeypatch.setattr(DeviceKind, "device_count", lambda self: len(answers["name"]))
    monkeypatch.setattr(DeviceKind, "device_name", lambda self, index=0: answers["name"][index])
    return answers


def test_without_a_driver_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert hardware.get_gpu_info() == ([], 0)
    assert hardware.get_driver_version() is None
    assert hardware.check_cuda_p2p_ib_support()
    assert not hardware.check_cuda_fp8_capability()


def test_the_drivers_answer_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = subprocess.CompletedProcess([], 0, stdout="NVIDIA H100 80GB HBM3\nNVIDIA H100 80GB HBM3\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: finished)
    assert hardware.get_gpu_info() == (["NVIDIA H100 80GB HBM3"] * 2, 2)


@pytest.mark.parametrize(
    ("name", "count", "driver", "supported"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "535.54.03", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.06", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
        ("NVIDIA GeForce RTX 4090", 1, "535.54.03", True),
        ("NVIDIA H100", 8, "535.54.03", True),
    ],
)
def test_cards_without_links(host: dict[str, list[str]], name: str, count: int, driver: str, supported: bool) -> None:
    host["name"], host["driver_version"] = [name] * count, [driver] * count
    assert hardware.check_cuda_p2p_ib_support() is supported
    if supported:
        hardware.refuse_missing_links(kind_of("cuda"))
    else:
        with pytest.raises(NotImplementedError, match="NCCL_P2P_DISABLE"):
            hardware.refuse_missing_links(kind_of("cuda"))


@pytest.mark.usefixtures("host")
def test_cards_without_links_that_were_told_not_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with pytest.raises(NotBuilt):
        hardware.refuse_missing_links(kind_of("cuda"))
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    hardware.refuse_missing_links(kind_of("cuda"))


def test_the_nearest_cores_are_read_from_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "0000:ca:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8,10-11\n")
    assert hardware.nearest_cores("00000000:CA:00.0", tmp_path) == {0, 1, 2, 8, 10, 11}
    assert hardware.nearest_cores("00000000:17:00.0", tmp_path) == set()


@pytest.mark.usefixtures("host")
def test_binding_happens_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores), raising=False)
    monkeypatch.setattr(hardware, "nearest_cores", lambda bus_id: {2, 3, 9} if "CA" in bus_id else set())
    hardware._bind_once.cache_clear()
    hardware.bind_to_cores(1)
    assert bound == []
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    hardware.bind_to_cores(1)
    hardware.bind_to_cores(1)
    hardware.set_numa_affinity(0)  # the host doesn't tell: nothing changes
    assert bound == [{2, 3}]
    hardware._bind_once.cache_clear()


def test_the_current_device_type_is_told_without_torch() -> None:
    assert hardware.get_current_device_type() == ("cpu", "MULTI_CPU")
