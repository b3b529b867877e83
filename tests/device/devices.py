"""Run a function on ranks that have imitated devices, and on ranks of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.device import sim
from tests.ranks import run_on_ranks

LIMIT_SECONDS = 120.0


def on_devices(
    function: Callable[..., Any], num_ranks: int = 1, *arguments: Any, num_devices: int | None = None, **options: Any
) -> list[Any]:
    """Return what each of ``num_ranks`` ranks with a device each returned."""
    environment = {"ACCELERATE_USE_CPU": "false", "SIM_DEVICES": str(num_devices or num_ranks)}
    call = partial(_with_devices, partial(function, *arguments, **options), num_devices or num_ranks)
    return run_on_ranks(call, num_ranks, timeout_seconds=LIMIT_SECONDS, environment=environment)


def _with_devices(function: Callable[[], Any], num_devices: int) -> Any:
    sim.start()
    sim.module.set_device_count(num_devices)
    return function()


def on_cpu(function: Callable[..., Any], num_ranks: int = 1, *arguments: Any, **options: Any) -> list[Any]:
    """Return what each of ``num_ranks`` ranks returned that compute on the CPU."""
    return run_on_ranks(partial(function, *arguments, **options), num_ranks, timeout_seconds=LIMIT_SECONDS)
