"""Queries about accelerators to the driver and the host: names, driver version, links, nearest cores, precisions."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from pathlib import Path
from typing import Final

from ..cores import usable_cpus
from ..errors import NotBuilt
from ..optional import is_torchao_available, is_transformer_engine_available
from ..settings.env import flag, read
from ..versions import is_torch_version
from .table import PROBE_TIMEOUT_SECONDS, DeviceKind, available_kind, kind_of, present

logger: logging.Logger = logging.getLogger(__name__)

#: Consumer cards whose driver offers no direct links between them before a certain version.
_WITHOUT_LINKS: Final = "RTX 40"
_FIRST_DRIVER_WITH_LINKS: Final = (550, 40, 7)
_LINK_VARIABLES: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
_FIRST_FP8_CAPABILITY: Final = (8, 9)
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


def _query(column: str) -> list[str]:
    """Ask the NVIDIA driver's tool for a column; return one line per device, or none if there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in finished.stdout.splitlines() if line.strip()] if finished.returncode == 0 else []


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA devices of this host, and their number, without importing torch."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if there is none, without importing torch."""
    return next(iter(_query("driver_version")), None)


def get_current_device_type() -> tuple[str, str]:
    """Return the device type for workers started here, and the DistributedType of several of them."""
    kind, _ = present()
    return kind.name, kind.label


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the NVIDIA devices of this host support peer-to-peer links; True for a single device."""
    names, count = get_gpu_info()
    return count <= 1 or not _lacks_links(names)


def _lacks_links(names: list[str]) -> bool:
    if not any(_WITHOUT_LINKS in name for name in names):
        return False
    version = get_driver_version() or ""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return numbers < _FIRST_DRIVER_WITH_LINKS


def refuse_missing_links(kind: DeviceKind) -> None:
    """Raise if several devices of this host have no direct links, unless direct links are disabled.

    Raises:
        NotBuilt: the cards have no direct links, but the communication library would try to use them.
    """
    if kind.device_count() < 2 or all(flag(name) for name in _LINK_VARIABLES):
        return
    names = [kind.device_name(index) for index in range(kind.device_count())]
    if _lacks_links(names):
        raise NotBuilt(
            f"{names[0]} with driver {get_driver_version()} has no direct links between devices. Set "
            f'{_LINK_VARIABLES[0]}="1" and {_LINK_VARIABLES[1]}="1" (`accelerate launch` does it), or install driver '
            "550.40.07."
        )


def check_cuda_fp8_capability() -> bool:
    """Return whether the current NVIDIA device computes in 8-bit floats (imports torch)."""
    return kind_of("cuda").capability() >= _FIRST_FP8_CAPABILITY


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores nearest to its device, once: later calls have no effect."""
    _bind_once(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores nearest to its device, if the host knows them."""
    bus_ids = _query("pci.bus_id")
    cores = nearest_cores(bus_ids[local_process_index]) if local_process_index < len(bus_ids) else set[int]()
    usable = cores & usable_cpus() if hasattr(os, "sched_setaffinity") else set[int]()
    if usable:
        os.sched_setaffinity(0, usable)
    if verbose or (verbose is None and flag("ACCELERATE_DEBUG_MODE")):
        where = f"cores {sorted(usable)}" if usable else "all cores, because the host doesn't tell which are near"
        logger.info("Process %d of this host runs on %s.", local_process_index, where)


@functools.cache
def _bind_once(local_process_index: int, verbose: bool | None) -> None:
    override_numa_affinity(local_process_index, verbose)


def bind_to_cores(local_process_index: int) -> None:
    """Bind this process to the cores nearest to its device if ACCELERATE_CPU_AFFINITY is set."""
    if read("ACCELERATE_CPU_AFFINITY") is not None and flag("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(local_process_index)


def nearest_cores(bus_id: str, devices: Path = _PCI_DEVICES) -> set[int]:
    """Return the cores of the NUMA node of the PCI device `0000:17:00.0`; empty if the host doesn't know it."""
    # The driver writes the domain with eight digits, the kernel with four.
    file = devices / bus_id.lower()[-12:] / "local_cpulist"
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


# -- availability of kinds of devices and precisions -------------------------------------------------------
#
# These functions import torch, and the vendor's extension if there is one. They always ask the driver; in the
# documented interface, `check_device` makes them do so.


@functools.cache
def _is_available(name: str) -> bool:
    return kind_of(name).is_available()


def is_cuda_available() -> bool:
    """Return whether a CUDA (or ROCm) device can be used."""
    return _is_available("cuda")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's GPU can be used, and torch is at least ``min_version``."""
    return is_torch_version(">=", min_version) and _is_available("mps")


def is_mlu_available(check_device: bool = False) -> bool:
    """Return whether an MLU can be used."""
    del check_device
    return _is_available("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Return whether a MUSA device can be used."""
    del check_device
    return _is_available("musa")


def is_npu_available(check_device: bool = False) -> bool:
    """Return whether an NPU can be used."""
    del check_device
    return _is_available("npu")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Return whether an SDAA device can be used."""
    del check_device
    return _is_available("sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether an HPU can be used; with ``init_hccl``, load its communication library too."""
    if not _is_available("hpu"):
        return False
    if init_hccl:
        import importlib

        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Return whether the HPU is a first-generation Gaudi."""
    if not is_hpu_available():
        return False
    import importlib

    return importlib.import_module("habana_frameworks.torch.utils.experimental")._get_device_type() == 1


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether an Intel GPU can be used."""
    del check_device
    return _is_available("xpu")


def is_neuron_available(check_device: bool = False) -> bool:
    """Return whether a Neuron device can be used."""
    del check_device
    return _is_available("neuron")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether an XLA device can be used; with ``check_is_tpu`` or ``check_is_gpu``, one of that hardware.

    Raises:
        ValueError: both checks are requested.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("`is_torch_xla_available` checks for a TPU or for a GPU, not for both at once.")
    if not _is_available("xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    import importlib

    hardware = importlib.import_module("torch_xla.runtime").device_type()
    return hardware == "TPU" if check_is_tpu else hardware in ("GPU", "CUDA", "ROCM")


def is_rocm_available() -> bool:
    """Return whether torch was built for ROCm, and an AMD device can be used."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_xccl_available() -> bool:
    """Return whether torch's process groups can communicate over xccl."""
    import torch

    return torch.distributed.is_available() and getattr(torch.distributed, "is_xccl_available", bool)()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine's device computes in bfloat16; False for XLA with ``ignore_tpu``."""
    kind = available_kind()
    if ignore_tpu and kind == kind_of("xla"):
        return False
    return kind.supports_bf16()


def is_fp16_available() -> bool:
    """Return whether this machine's device computes in float16."""
    return available_kind().supports_fp16()


def is_fp8_available() -> bool:
    """Return whether a package for 8-bit floats is installed."""
    return is_transformer_engine_available() or is_torchao_available()
