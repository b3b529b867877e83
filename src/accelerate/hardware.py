"""What the driver and the host say about the accelerators here: names, driver version, links, nearest cores."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from pathlib import Path
from typing import Final

from .cores import usable_cpus
from .devices import PROBE_TIMEOUT_SECONDS, DeviceKind, kind_of, present
from .errors import NotBuilt
from .settings.env import flag, read

logger = logging.getLogger(__name__)

#: Consumer cards whose driver offers no direct links between them before a certain version.
_WITHOUT_LINKS: Final = "RTX 40"
_FIRST_DRIVER_WITH_LINKS: Final = (550, 40, 7)
_SWITCHES: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
_FIRST_FP8_CAPABILITY: Final = (8, 9)
_PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


def _query(column: str) -> list[str]:
    """One line per NVIDIA device, from the driver's own tool; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in finished.stdout.splitlines() if line.strip()] if finished.returncode == 0 else []


def get_gpu_info() -> tuple[list[str], int]:
    """The names of the NVIDIA devices of this host, and their number; torch is not imported."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str | None:
    """The version of the NVIDIA driver, or None without one; torch is not imported."""
    return next(iter(_query("driver_version")), None)


def get_current_device_type() -> tuple[str, str]:
    """The device type that workers started from here would use, and the DistributedType of several of them."""
    kind, _ = present()
    return kind.name, kind.label


def check_cuda_p2p_ib_support() -> bool:
    """Whether the NVIDIA devices of this host can talk to each other directly; a single one always can."""
    names, count = get_gpu_info()
    return count <= 1 or not _lacks_links(names)


def _lacks_links(names: list[str]) -> bool:
    if not any(_WITHOUT_LINKS in name for name in names):
        return False
    version = get_driver_version() or ""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return numbers < _FIRST_DRIVER_WITH_LINKS


def refuse_missing_links(kind: DeviceKind) -> None:
    """Several devices of this host can talk to each other, or have been told not to try.

    Raises:
        NotBuilt: the cards have no direct links, and the communication library would try to use them.
    """
    if kind.device_count() < 2 or all(flag(name) for name in _SWITCHES):
        return
    names = [kind.device_name(index) for index in range(kind.device_count())]
    if _lacks_links(names):
        raise NotBuilt(
            f"{names[0]} with driver {get_driver_version()} has no direct links between devices. Set "
            f'{_SWITCHES[0]}="1" and {_SWITCHES[1]}="1" (`accelerate launch` does it), or install driver 550.40.07.'
        )


def check_cuda_fp8_capability() -> bool:
    """Whether the current NVIDIA device computes in 8-bit floating point (imports torch)."""
    return kind_of("cuda").capability() >= _FIRST_FP8_CAPABILITY


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """This process runs on the cores that are nearest to its device; after the first call, calls change nothing."""
    _bind_once(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """This process runs on the cores that are nearest to its device; where the host can't tell, on all as before."""
    bus_ids = _query("pci.bus_id")
    cores = nearest_cores(bus_ids[local_process_index]) if local_process_index < len(bus_ids) else set[int]()
    usable = cores & usable_cpus() if hasattr(os, "sched_setaffinity") else set[int]()
    if usable:
        os.sched_setaffinity(0, usable)
    if verbose or (verbose is None and flag("ACCELERATE_DEBUG_MODE")):
        told = f"cores {sorted(usable)}" if usable else "all cores, because the host doesn't tell which are near"
        logger.info("Process %d of this host runs on %s.", local_process_index, told)


@functools.cache
def _bind_once(local_process_index: int, verbose: bool | None) -> None:
    override_numa_affinity(local_process_index, verbose)


def bind_to_cores(local_process_index: int) -> None:
    """Where ACCELERATE_CPU_AFFINITY asks for it, this process runs on the cores nearest to its device."""
    if read("ACCELERATE_CPU_AFFINITY") is not None and flag("ACCELERATE_CPU_AFFINITY"):
        set_numa_affinity(local_process_index)


def nearest_cores(bus_id: str, devices: Path = _PCI_DEVICES) -> set[int]:
    """The cores of the memory node that the PCI device `0000:17:00.0` hangs on; empty where the host can't tell."""
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
