"""The memory budget of each device, and the placement problem to solve. Internal."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from ..checkpointing import convert_file_size_to_int
from ..devices.memory import convert_bytes
from ..devices.table import CPU, KINDS, DeviceKind, available_kind
from ..errors import SettingError
from ..optional import require
from .sizes import DISK, ByteDtype, compute_module_sizes, get_module_leaves, is_inside, no_split_classes, own_parts

Bytes = int | float
DeviceKey = int | str

_log = logging.getLogger(__name__)

#: The fraction of a single device that a model may take without ``max_memory``; the rest is for activations.
SINGLE_DEVICE_FRACTION = 0.9


def host_memory_available() -> int:
    """Return the free bytes of host memory, without swapping and within the container's limit.

    Raises:
        MissingDependency: `psutil` is needed on this system and isn't installed.
    """
    return min([_host_memory(), *_container_memory()])


def _host_memory() -> int:
    return _meminfo_bytes("MemAvailable:") or int(
        require("psutil", "memory", purpose="Measuring the free host memory").virtual_memory().available
    )


def _container_memory() -> list[int]:
    """Return the free bytes of the container as a list; empty if it has no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        # The page cache counts as used, but is dropped when other memory is needed.
        lines = (folder / "memory.stat").read_text().splitlines()
        used -= next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        return [] if limit == "max" else [max(int(limit) - used, 0)]
    except (OSError, ValueError):
        return []


def free_memory_on(device: torch.device) -> int | None:
    """Return the bytes that new tensors can use on a device now; None if unknown."""
    if device.type == CPU.name:
        return host_memory_available() + _meminfo_bytes("SwapFree:")
    kind = next((kind for kind in KINDS if kind.name == device.type), None)
    free = None if kind is None or not kind.select else kind.free_memory(device)
    if kind is None or free is None:
        return None
    reserved = getattr(torch.get_device_module(kind.name), "memory_reserved", None)
    # Memory reserved by torch's allocator is free for tensors, but not for other programs.
    return free + (0 if reserved is None else max(reserved(device) - kind.memory_allocated(device), 0))


def _meminfo_bytes(field: str) -> int:
    """Return a field of /proc/meminfo in bytes; 0 if it doesn't exist."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def get_max_memory(max_memory: Mapping[DeviceKey, Bytes | str] | None = None) -> dict[DeviceKey, Bytes]:
    """Return the limit in bytes of each device, fastest first: accelerators by index, then cpu, then disk.

    Without ``max_memory``, return the free memory of each accelerator and of the host. Text such as ``"10GiB"`` is
    converted to bytes.

    Raises:
        SettingError: a key isn't a device.
    """
    if max_memory is None:
        return _measured_memory()
    unknown = [key for key in max_memory if not _is_device_key(key)]
    if unknown:
        raise SettingError(
            f"max_memory has the key {unknown[0]!r}, which is no device. Keys are the index of an accelerator (0, 1, "
            f"...), {', '.join(map(repr, _named_devices()))}."
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
    return {key: given[key] for key in (*indices, *_named_devices()) if key in given}


def _named_devices() -> list[str]:
    """Return the devices with a name instead of an index: single accelerators such as mps, cpu and disk."""
    return [*(kind.name for kind in KINDS if not kind.select and kind is not CPU), CPU.name, DISK]


def _is_device_key(key: object) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or key in _named_devices()


def _measured_memory() -> dict[DeviceKey, Bytes]:
    kind = available_kind()
    found: dict[DeviceKey, Bytes] = {}
    shares_host_memory = False
    if kind is not CPU and not kind.select:
        # The only device of its kind is part of the host and shares its memory.
        total = kind.total_memory()
        if total is not None:
            found[kind.name] = max(total - kind.memory_allocated(), 0)
            shares_host_memory = True
    elif kind is not CPU:
        for index in range(kind.device_count()):
            free = _free_accelerator_memory(kind, index)
            if free is not None:
                found[index] = free
                shares_host_memory = shares_host_memory or _is_integrated(kind, index)
    if not shares_host_memory:
        found[CPU.name] = host_memory_available()
    return found


def _free_accelerator_memory(kind: DeviceKind, index: int) -> int | None:
    device = kind.device(index)
    try:
        torch.tensor([0], device=device)  # the first tensor on a device also allocates memory for the driver
        free = kind.free_memory(device)
    except RuntimeError as error:
        _log.info("Device %s is left out, because it can't be used: %s", device, error)
        return None
    if free is None:
        _log.warning("Device %s is left out, because its free memory can't be measured. Give max_memory.", device)
    return free


def _is_integrated(kind: DeviceKind, index: int) -> bool:
    """Return whether the device shares the host's memory."""
    try:
        properties = torch.get_device_module(kind.name).get_device_properties(index)
    except (AttributeError, RuntimeError):
        return False
    return bool(getattr(properties, "is_integrated", False))


def accelerators_in(max_memory: Mapping[DeviceKey, object]) -> list[DeviceKey]:
    """Return the accelerators of a budget, fastest first."""
    return [device for device in max_memory if device not in (CPU.name, DISK)]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, Bytes | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: ByteDtype | None = None,
    special_dtypes: Mapping[str, ByteDtype] | None = None,
    low_zero: bool = False,
) -> dict[DeviceKey, Bytes]:
    """Return ``max_memory`` (default: the free memory) with limits that spread the model evenly over accelerators.

    The last accelerator keeps all its memory. With ``low_zero``, the first one only gets the parts that don't fit on
    the others.
    """
    budget = get_max_memory(max_memory)
    used = [device for device in accelerators_in(budget) if budget[device] > 0]
    if not used:
        return budget
    if len(used) == 1:
        if max_memory is None:
            budget[used[0]] = int(budget[used[0]] * SINGLE_DEVICE_FRACTION)
            _log.info(
                "The model may take %d%% of device %s, the rest is for activations. Give max_memory for another share.",
                100 * SINGLE_DEVICE_FRACTION,
                used[0],
            )
        return budget
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    total = sizes.get("", 0)
    share = total // (len(used) - 1 if low_zero else len(used)) + _slack(model, sizes, no_split_module_classes)
    for device in used[:-1]:
        if not (low_zero and device == used[0]):
            budget[device] = min(share, budget[device])
    if low_zero:
        left = max(0, total - sum(budget[device] for device in used[1:]))
        budget[used[0]] = min(left, budget[used[0]])
    return budget


def _slack(model: nn.Module, sizes: Mapping[str, int], no_split: str | Iterable[str] | None) -> int:
    """Return the bytes added to an even share for a block that just doesn't fit: 1.25 times the largest block."""
    classes = no_split_classes(no_split)
    blocks = [sizes.get(name, 0) for name, module in model.named_modules() if type(module).__name__ in classes]
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    final = [modules[name] for name in get_module_leaves(modules)]
    mean = sum(final) // max(len(final), 1)
    return int(1.25 * max([*blocks, mean]))


# --------------------------------------------------------------------------------------------------
# The placement problem (a tree of parts with sizes, ties between them, devices with limits) and its solution


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A module, or a single tensor of a split module."""

    name: str
    kind: str
    num_bytes: int
    buffer_bytes: int
    parts: tuple[Part, ...]  # its parts if it is split; empty if it is never split
    is_tensor: bool = False

    @cached_property
    def largest_layer(self) -> int:
        """The bytes of its largest layer, which has to be on one device as a whole when it runs."""
        return max((part.largest_layer for part in self.parts if not part.is_tensor), default=self.num_bytes)

    def unsplit_parts(self) -> Iterable[Part]:
        """Yield the parts that are never split, in the order of definition."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.unsplit_parts()


def parts_of(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    sizes: Mapping[str, int],
    buffer_sizes: Mapping[str, int],
    no_split: frozenset[str],
) -> list[Part]:
    """Return the named modules and tensors as parts."""

    def part_of(name: str, module: nn.Module | torch.Tensor) -> Part:
        splits = isinstance(module, nn.Module) and type(module).__name__ not in no_split and any(module.children())
        inner = own_parts(module) if isinstance(module, nn.Module) and splits else []
        return Part(
            name,
            type(module).__name__,
            sizes.get(name, 0),
            buffer_sizes.get(name, 0),
            tuple(part_of(f"{name}.{own}", each) for own, each in inner),
            is_tensor=isinstance(module, torch.Tensor),
        )

    return [part_of(name, module) for name, module in modules]


@final
@dataclass(frozen=True)
class PlacementProblem:
    """The parts to place, the devices, and the limit of each device."""

    parts: tuple[Part, ...]
    devices: tuple[DeviceKey, ...]  # fastest first
    limits: Mapping[DeviceKey, Any]  # bytes
    ties: tuple[frozenset[str], ...]  # names of one and the same tensor

    @property
    def accelerators(self) -> list[DeviceKey]:
        """The accelerators among the devices, fastest first; empty if there are none."""
        return accelerators_in(self.limits)

    @property
    def fastest(self) -> list[DeviceKey]:
        """The devices that run layers without fetching them first: the accelerators, else cpu."""
        return self.accelerators or [CPU.name]

    @property
    def reserve_devices(self) -> list[DeviceKey]:
        """The devices that reserve memory for the largest layer offloaded to slower devices."""
        accelerators = self.accelerators
        if not accelerators:
            return [CPU.name]
        return accelerators[:1] if isinstance(accelerators[0], str) else [accelerators[0], CPU.name]

    def limit(self, device: DeviceKey) -> float:
        """Return the maximum bytes on a device."""
        return self.limits.get(device, math.inf if device == DISK else 0)

    def tied_names_outside(self, part: Part) -> list[str]:
        """Return the names, outside of ``part``, of tensors that are also inside it."""
        return [
            name
            for group in self.ties
            if any(is_inside(name, part.name) for name in group)
            for name in group
            if not is_inside(name, part.name)
        ]


@final
@dataclass(frozen=True)
class Placement:
    """The device of one part, and the reason for it."""

    part: Part
    device: DeviceKey
    reason: str


@final
class DevicePlan(OrderedDict[str, Any]):
    """A device map (module name to device) that prints as a table with sizes and reasons."""

    problem: PlacementProblem | None = None
    placements: Sequence[Placement] = ()
    method: str = ""

    @classmethod
    def of(cls, problem: PlacementProblem, placements: Sequence[Placement], method: str) -> DevicePlan:
        """Build the plan from these placements."""
        plan = cls((each.part.name, each.device) for each in placements)
        plan.problem, plan.placements, plan.method = problem, tuple(placements), method
        return plan

    def num_bytes_on(self, devices: Iterable[DeviceKey]) -> int:
        """Return the bytes placed on the devices together."""
        wanted = set(devices)
        return sum(each.part.num_bytes for each in self.placements if each.device in wanted)

    def __str__(self) -> str:
        if self.problem is None:
            return repr(self)
        rows = [
            (
                each.part.name or "(the model)",
                each.part.kind,
                convert_bytes(each.part.num_bytes),
                str(each.device),
                each.reason,
            )
            for each in self.placements
        ]
        table = _aligned([("part", "class", "size", "device", "reason"), *rows])
        filled = [
            (str(device), f"{convert_bytes(self.num_bytes_on([device]))} of {_limit_text(self.problem.limit(device))}")
            for device in self.problem.devices
        ]
        return "\n".join([f"Device map ({self.method})", *table, "", *_aligned(filled)])


def _limit_text(limit: float) -> str:
    return "no limit" if math.isinf(limit) else convert_bytes(limit)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
