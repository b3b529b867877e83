"""``torch.sim``: what torch and its users call on the module of a device."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_sim: Any = None  # the extension, once it is loaded
DEVICES = "SIM_DEVICES"  # how many this machine has
VISIBLE = "SIM_VISIBLE_DEVICES"


def load(extension: ModuleType) -> None:
    """Name the backend, and make the extension's functions this module's."""
    global _sim
    _sim = extension
    extension.set_device_count(count_devices())


def count_devices() -> int:
    """Count the devices that the environment leaves visible, as a driver would."""
    count, visible = int(os.environ.get(DEVICES, "2")), os.environ.get(VISIBLE)
    return (
        count
        if visible is None
        else len([one for one in visible.split(",") if one.strip().isdigit() and int(one) < count])
    )


# -- devices


def allow_after_fork() -> None:
    """Let this fork of a process that has used a device use it too, which no real device does."""
    _sim.allow_after_fork()


def is_available() -> bool:
    return _sim.device_count() > 0


def is_initialized() -> bool:
    return _sim.was_used()


def init() -> None:
    _sim.initialize()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _sim.was_forked()


def device_count() -> int:
    return _sim.device_count()


def current_device() -> int:
    return _sim.current_device()


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def set_device(device: Any) -> None:
    _sim.set_device(_index(device))


@contextmanager
def device(index: Any) -> Iterator[None]:
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Any = None) -> str:
    return "imitated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# -- streams and events


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


# -- memory


def _stats(device: Any) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: Any = None) -> int:
    return _stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    return _stats(device).get("allocated_bytes.all.peak", 0)


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def memory_stats(device: Any = None) -> dict[str, Any]:
    return _stats(device)


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_memory_limit(num_bytes: int, device: Any = None) -> None:
    """Give a device that much memory."""
    _sim.set_memory_limit(_index(device), num_bytes)


# -- random numbers


def _generator(device: Any = None) -> torch.Generator:
    return _sim.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    _generator().seed()


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    _generator(device).set_state(state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# -- for tests


def set_device_count(count: int) -> None:
    """Make this process see that many devices."""
    _sim.set_device_count(count)


def counters() -> dict[str, int]:
    """What was done so far: kernels, copies by direction, waits of the host."""
    return _sim.counters()


def set_copy_delay(microseconds: int) -> None:
    """Make an asynchronous copy take that long."""
    _sim.set_copy_delay(microseconds)


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yield a mapping that holds, at the end of the block, what was done in it."""
    before, found = counters(), {}
    yield found
    found.update({name: count - before[name] for name, count in counters().items()})


@contextmanager
def stacks_of_synchronizations() -> Iterator[list[str]]:
    """Yield a list to which each wait of the host for a device adds where Python stood."""
    found: list[str] = []
    _sim.observe_synchronizations(lambda: found.append("".join(traceback.format_stack()[:-1])))
    try:
        yield found
    finally:
        _sim.observe_synchronizations(None)


@contextmanager
def unordered_reads() -> Iterator[list[str]]:
    """Yield a list that holds, at the end of the block, the reads that nothing orders after another stream's write."""
    found: list[str] = []
    _sim.check_order(True)
    try:
        yield found
        found += _sim.unordered_reads()
    finally:
        _sim.check_order(False)
