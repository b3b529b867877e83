"""Random number streams by name: seed them, make ranks agree on them, capture and restore them.

A stream is one of the process's default generators: Python's, NumPy's, torch's on the host, and torch's on the devices.
States are JSON values and tensors; nothing is pickled.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from ..devices.table import DeviceKind, available_kind, kind_of
from ..errors import ArgumentError, SettingError
from . import collectives
from .world import World, current_world

#: The streams of the host, in the order in which they are captured.
HOST_STREAMS = ("python", "numpy", "torch")


# -- seeding -----------------------------------------------------------------------------------------------


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed every random number stream of this process with ``seed``.

    Args:
        seed: the same number on every rank.
        device_specific: add the rank to the seed, so that ranks draw different numbers.
        deterministic: also make torch raise for operations without a deterministic implementation.

    Raises:
        ArgumentError: the seed isn't a whole number.
    """
    try:
        operator.index(seed)
    except TypeError:
        near = f" Did you mean set_seed({int(seed)})?" if isinstance(seed, str) and seed.isdecimal() else ""
        wrong = f"set_seed({seed!r}): the seed has to be a whole number, not {type(seed).__name__}.{near}"
        raise ArgumentError(wrong) from None
    world = current_world()
    if device_specific:
        seed += world.rank if world is not None else 0
    if world is not None and world.coordinator is not None and world.is_distributed:
        world.coordinator.publish(f"seed/{world.rank}", str(seed))
    random.seed(seed)
    # NumPy's legacy generator takes 32 bits, torch's takes 64.
    _numpy().seed(seed % 2**32)
    torch.manual_seed(seed)
    _device_kind().manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def has_common_seed(world: World) -> bool:
    """Return whether all ranks have published the same last seed of :func:`set_seed`."""
    coordinator = world.coordinator
    seeds = {} if coordinator is None else coordinator.published([f"seed/{rank}" for rank in range(world.size)])
    return len(seeds) == world.size and len(set(seeds.values())) == 1


def seed_host_streams(seed: int) -> None:
    """Seed the streams of the host with ``seed`` (NumPy's only if the program uses NumPy)."""
    random.seed(seed)
    # Not torch.manual_seed: if a device isn't initialised yet, that queues a call for it each time.
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        _numpy().seed(seed % 2**32)


def _numpy() -> Any:
    import numpy

    return numpy.random


def _device_kind() -> DeviceKind:
    world = current_world()
    return world.kind if world is not None else available_kind()


# -- agreement between ranks -------------------------------------------------------------------------------


def broadcast_value(value: object, world: World | None = None) -> Any:
    """Return rank 0's ``value`` on every rank."""
    if world is None:
        world = current_world()
    if world is None or not world.is_distributed:
        return value
    holder = [value]
    collectives.broadcast_object_list(holder, from_process=0, world=world)
    return holder[0]


def synchronize_rng_state(
    rng_type: str | Enum | None = None, generator: torch.Generator | None = None, *, world: World | None = None
) -> None:
    """Set the named stream on every rank to the state that it has on rank 0.

    Args:
        rng_type: ``"torch"``, ``"python"``, ``"numpy"``, ``"generator"``, or the name of a kind of device.
        generator: the generator that ``"generator"`` means.

    Raises:
        AssertionError: the named generator or device is missing.
        SettingError: there is no stream of that name.
    """
    name = str(rng_type.value if isinstance(rng_type, Enum) else rng_type)
    if name == "generator":
        assert generator is not None, "synchronize_rng_state('generator') needs the generator to synchronise."
        generator.set_state(broadcast_value(generator.get_state(), world))
    elif name in HOST_STREAMS:
        set_host_stream(name, broadcast_value(host_stream(name), world))
    else:
        kind = _named_kind(name)
        assert kind.is_available(), f"synchronize_rng_state({name!r}): this process has no {name} device."
        kind.set_rng_states(broadcast_value(kind.rng_states(), world))


def check_stream_name(rng_type: str | Enum) -> None:
    """Raise SettingError if no random number stream has this name."""
    name = str(rng_type.value if isinstance(rng_type, Enum) else rng_type)
    if name != "generator" and name not in HOST_STREAMS:
        _named_kind(name)


def _named_kind(name: str) -> DeviceKind:
    try:
        return kind_of(name)
    except ValueError as error:
        raise SettingError(
            f"rng_types={name!r}: there is no such random number stream. Known are generator, "
            f"{', '.join(HOST_STREAMS)} and the kinds of devices."
        ) from error


def synchronize_rng_states(
    rng_types: Iterable[str | Enum], generator: torch.Generator | None = None, *, world: World | None = None
) -> None:
    """Set each named stream on every rank to the state that it has on rank 0."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator=generator, world=world)


# -- capture and restore -----------------------------------------------------------------------------------


def host_stream(name: str) -> Any:
    """Return the state of a host stream: a tensor for torch, lists of numbers for Python and NumPy."""
    if name == "torch":
        return torch.get_rng_state()
    if name == "python":
        version, words, gauss = random.getstate()
        return [version, list(words), gauss]
    kind, words, position, has_gauss, gauss = _numpy().get_state()
    return [str(kind), words.tolist(), int(position), int(has_gauss), float(gauss)]


def set_host_stream(name: str, state: Any) -> None:
    """Set the host stream to ``state``, as :func:`host_stream` gave it."""
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        version, words, gauss = state
        random.setstate((version, tuple(words), gauss))
    else:
        _numpy().set_state(tuple(state))


def capture_host_streams(names: Iterable[str] = HOST_STREAMS) -> dict[str, Any]:
    """Return the states of the named host streams; NumPy's only if the program uses NumPy."""
    return {name: host_stream(name) for name in names if name != "numpy" or "numpy" in sys.modules}


@contextmanager
def host_streams(states: Mapping[str, Any]) -> Iterator[None]:
    """Enter a context in which the host streams continue from ``states``; restore them afterwards."""
    names = [name for name in HOST_STREAMS if name in states]
    before = {name: host_stream(name) for name in names}
    for name in names:
        set_host_stream(name, states[name])
    try:
        yield
    finally:
        for name, state in before.items():
            set_host_stream(name, state)


def same_stream_state(one: Any, other: Any) -> bool:
    """Return whether two states from :func:`host_stream` are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def capture_rng_states(step: int | None = None) -> dict[str, Any]:
    """Return the states of all streams of this process, by name, and the step at which they were taken."""
    states: dict[str, Any] = capture_host_streams()
    kind = _device_kind()
    device_states = kind.rng_states()
    if device_states:
        states[kind.name] = device_states
    if step is not None:
        states["step"] = step
    return states


def restore_rng_states(states: Mapping[str, object]) -> list[str]:
    """Set the streams to ``states``; return what couldn't be restored, one reason per stream."""
    missed: list[str] = []
    for name, state in states.items():
        if name == "step":
            continue
        reason = _restore(name, state)
        if reason:
            missed.append(f"{name}: {reason}")
    kind = _device_kind()
    if kind.rng_states() and kind.name not in states:
        missed.append(f"{kind.name}: the saved run had no such device")
    return missed


def _restore(name: str, state: Any) -> str | None:
    try:
        if name in HOST_STREAMS:
            set_host_stream(name, state)
            return None
        kind = kind_of(name)
        if not kind.is_available():
            return "this run has no such device"
        num_devices = len(kind.rng_states())
        if num_devices != len(state):
            return f"saved for {len(state)} devices, this process sees {num_devices}"
        kind.set_rng_states([torch.as_tensor(one) if isinstance(one, list) else one for one in state])
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        return str(error)
    return None
