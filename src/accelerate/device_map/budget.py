"""How many bytes each device has for a model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpointing import convert_file_size_to_int
from ..devices import CPU, KINDS, DeviceKind, available_kind
from ..errors import SettingError
from ..optional import require
from .sizes import ByteDtype, compute_module_sizes, get_module_leaves, no_split_classes
from .tensors import DISK

Bytes = int | float
Place = int | str

_log = logging.getLogger(__name__)

#: What is left for activations where only one device is there and nobody said how much of it the model may take.
SHARE_OF_A_SINGLE_DEVICE = 0.9


def host_memory_available() -> int:
    """The bytes of host memory that a new tensor could take without swapping, within the limit of the container.

    Raises:
        MissingDependency: only `psutil` could tell, and it isn't installed.
    """
    return min([_host_memory(), *_container_memory()])


def _host_memory() -> int:
    return _from_kernel("MemAvailable:") or int(
        require("psutil", "memory", purpose="Measuring the free host memory").virtual_memory().available
    )


def _container_memory() -> list[int]:
    """What the container may still take, where it has a limit of its own."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        # Files kept in memory count as used, but make room when something else needs it.
        lines = (folder / "memory.stat").read_text().splitlines()
        used -= next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return [] if limit == "max" else [max(int(limit) - used, 0)]
    except (OSError, ValueError):
        return []


def free_on(device: torch.device) -> int | None:
    """The bytes that new tensors could take on a device now; None where nobody can tell."""
    if device.type == CPU.name:
        return host_memory_available() + _from_kernel("SwapFree:")
    kind = next((kind for kind in KINDS if kind.name == device.type), None)
    free = None if kind is None or not kind.select else kind.free_memory(device)
    if kind is None or free is None:
        return None
    reserved = getattr(torch.get_device_module(kind.name), "memory_reserved", None)
    # What torch keeps for reuse isn't free for others, but it is for tensors.
    return free + (0 if reserved is None else max(reserved(device) - kind.memory_allocated(device), 0))


def _from_kernel(field: str) -> int:
    """A line of the kernel's own account in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def get_max_memory(max_memory: Mapping[Place, Bytes | str] | None = None) -> dict[Place, Any]:
    """Bytes by device, fastest first: accelerators by index, then cpu, then disk.

    Without ``max_memory``, what is free now on each accelerator and in host memory. Text such as ``"10GiB"`` becomes
    bytes.

    Raises:
        SettingError: a key is no device.
    """
    if max_memory is None:
        return _measured()
    unknown = [key for key in max_memory if not _is_place(key)]
    if unknown:
        raise SettingError(
            f"max_memory has the key {unknown[0]!r}, which is no device. Keys are the index of an accelerator (0, 1, "
            f"...), {', '.join(map(repr, _named_places()))}."
        )
    given = {key: convert_file_size_to_int(v) if isinstance(v, str) else v for key, v in max_memory.items()}
    indices = sorted(key for key in given if isinstance(key, int))
    kind = available_kind()
    count = 0 if kind is CPU else kind.device_count()
    for index in indices:
        if not 0 <= index < count:
            _log.warning(
                "max_memory names device %d, and the accelerators here are %s.", index, list(range(count)) or "none"
            )
    return {key: given[key] for key in (*indices, *_named_places()) if key in given}


def _named_places() -> list[str]:
    """Devices that go by a name: kinds of which a process sees only one, the host, the disk."""
    return [*(kind.name for kind in KINDS if not kind.select and kind is not CPU), CPU.name, DISK]


def _is_place(key: object) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or key in _named_places()


def _measured() -> dict[Place, Any]:
    kind = available_kind()
    found: dict[Place, Any] = {}
    shares_host_memory = False
    if kind is not CPU and not kind.select:
        # The only device of its kind is a part of the host, and so is its memory.
        total = kind.total_memory()
        if total is not None:
            found[kind.name] = max(total - kind.memory_allocated(), 0)
            shares_host_memory = True
    elif kind is not CPU:
        for index in range(kind.device_count()):
            free = _free_on(kind, index)
            if free is not None:
                found[index] = free
                shares_host_memory = shares_host_memory or _is_integrated(kind, index)
    if not shares_host_memory:
        found[CPU.name] = host_memory_available()
    return found


def _free_on(kind: DeviceKind, index: int) -> int | None:
    device = kind.device(index)
    try:
        torch.tensor([0], device=device)  # the first tensor on a device takes memory for the driver's own needs
        free = kind.free_memory(device)
    except RuntimeError as error:
        _log.info("Device %s is left out, because it can't be used: %s", device, error)
        return None
    if free is None:
        _log.warning("Device %s is left out, because its free memory can't be asked. Give max_memory.", device)
    return free


def _is_integrated(kind: DeviceKind, index: int) -> bool:
    """Whether the device has no memory of its own."""
    try:
        properties = torch.get_device_module(kind.name).get_device_properties(index)
    except (AttributeError, RuntimeError):
        return False
    return bool(getattr(properties, "is_integrated", False))


def accelerators_in(max_memory: Mapping[Place, Any]) -> list[Place]:
    """The devices of a budget that are neither host memory nor disk, fastest first."""
    return [place for place in max_memory if place not in (CPU.name, DISK)]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Place, Bytes | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: ByteDtype | None = None,
    special_dtypes: Mapping[str, ByteDtype] | None = None,
    low_zero: bool = False,
) -> dict[Place, Any]:
    """``max_memory`` (left out: what is free now) with limits that spread the model evenly over the accelerators.

    The last one keeps all its memory. With ``low_zero``, the first one only gets what the others can't take.
    """
    budget = get_max_memory(max_memory)
    used = [place for place in accelerators_in(budget) if budget[place] > 0]
    if not used:
        return budget
    if len(used) == 1:
        if max_memory is None:
            budget[used[0]] = int(budget[used[0]] * SHARE_OF_A_SINGLE_DEVICE)
            _log.info(
                "The model may take %d%% of device %s, the rest is for activations. Give max_memory for another share.",
                100 * SHARE_OF_A_SINGLE_DEVICE,
                used[0],
            )
        return budget
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    total = sizes.get("", 0)
    share = total // (len(used) - 1 if low_zero else len(used)) + _slack(model, sizes, no_split_module_classes)
    for place in used[:-1]:
        if not (low_zero and place == used[0]):
            budget[place] = min(share, budget[place])
    if low_zero:
        left = max(0, total - sum(budget[place] for place in used[1:]))
        budget[used[0]] = min(left, budget[used[0]])
    return budget


def _slack(model: nn.Module, sizes: Mapping[str, int], no_split: str | Iterable[str] | None) -> int:
    """Room for the piece that just doesn't fit any more: a quarter more than the largest one."""
    classes = no_split_classes(no_split)
    blocks = [sizes.get(name, 0) for name, module in model.named_modules() if type(module).__name__ in classes]
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    final = [modules[name] for name in get_module_leaves(modules)]
    mean = sum(final) // max(len(final), 1)
    return int(1.25 * max([*blocks, mean]))
