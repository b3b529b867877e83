"""Control which processes run a block: barriers, guards, ordered sections, and parts of a list.

The process that runs first releases the others even if it fails.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast, overload

import torch

from ..devices.table import CPU, KINDS
from ..errors import PreparationError
from ..nested import send_to_device
from .collectives import coordinator_of, world_or_joined
from .world import World

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: The labels of worlds whose ranks each have an accelerator of their own.
MULTI_DEVICE_LABELS: Final = tuple(kind.label for kind in KINDS if kind.label.startswith("MULTI_") and kind is not CPU)


# -- waiting -----------------------------------------------------------------------------------------------


def wait_for_everyone(world: World | None = None) -> None:
    """Wait until every process arrives here and has finished the work queued on its device.

    Raises:
        CollectiveError: a process has ended, or is in another operation, and will never come.
    """
    here = world_or_joined(world)
    if here.size == 1:
        return
    if here.members is not None:
        here.members.wait_for_everyone()
        return
    coordinator = coordinator_of(here, "wait_for_everyone")
    here.kind.synchronize()
    coordinator.wait_for_everyone()


@contextmanager
def main_process_first(world: World | None = None) -> Generator[None]:
    """Enter a context that rank 0 runs before the others. If it fails there, the others still run it."""
    here = world_or_joined(world)
    with _after(None if here.is_main else 0, "main_process_first", here, is_awaited=here.is_main):
        yield


@contextmanager
def local_main_process_first(world: World | None = None) -> Generator[None]:
    """Enter a context that the first process of every host runs before the others of its host."""
    here = world_or_joined(world)
    first = None if here.is_local_main else here.rank - here.local_rank
    with _after(first, "local_main_process_first", here, is_awaited=here.is_local_main):
        yield


@contextmanager
def in_order(world: World | None = None) -> Generator[None]:
    """Enter a context that the processes run one after another in rank order, even if one fails."""
    here = world_or_joined(world)
    with _after(None if here.is_main else here.rank - 1, "in_order", here, is_awaited=not here.is_last):
        yield


@contextmanager
def _after(before: int | None, operation: str, world: World, *, is_awaited: bool) -> Generator[None]:
    """Enter a context after rank `before` has left its own; the end of an awaited one releases the others."""
    if world.size == 1:
        yield
        return
    coordinator = coordinator_of(world, operation)
    name = f"{coordinator.begin(operation)}/done"
    if before is not None:
        coordinator.wait_for_key(f"{name}/{before}", setter=before)
    try:
        yield
    finally:
        if is_awaited:  # also after an error: it is raised on this rank, and the others continue
            coordinator.set_key(f"{name}/{world.rank}")


# -- guards ------------------------------------------------------------------------------------------------


class Guard(Protocol):
    """A decorator that makes a function run on some processes only, and return None on the others."""

    def __call__(self, function: Callable[Parameters, Result], /) -> Callable[Parameters, Result | None]: ...


@overload
def only_when(
    is_chosen: Callable[[], bool], function: Callable[Parameters, Result]
) -> Callable[Parameters, Result | None]: ...
@overload
def only_when(is_chosen: Callable[[], bool], function: None = None) -> Guard: ...
@overload
def only_when(is_chosen: Callable[[], bool], function: Callable[..., object] | None) -> Callable[..., Any]: ...
def only_when(is_chosen: Callable[[], bool], function: Callable[..., object] | None = None) -> Callable[..., Any]:
    """Decorate `function` to run where `is_chosen()` is true at the call, and to return None elsewhere.

    Without `function`, return a decorator.
    """
    if function is None:
        return functools.partial(only_when, is_chosen)

    @functools.wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs) if is_chosen() else None

    return guarded


class ProcessGuards(ABC):
    """The decorators that make a function run on some processes only, by the subclass's attributes of this process."""

    is_main_process: Any
    is_local_main_process: Any
    is_last_process: Any
    num_processes: Any
    process_index: Any
    local_process_index: Any

    @overload
    def on_main_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Guard: ...
    def on_main_process(self, function: Callable[..., object] | None = None) -> Callable[..., object]:
        """Wrap ``function`` to run on rank 0 only; it returns None on other ranks.

        Example:
            ```python
            @accelerator.on_main_process
            def write_report(text):
                Path("report.txt").write_text(text)

            write_report("done")
            ```
        """
        return only_when(lambda: self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Guard: ...
    def on_local_main_process(self, function: Callable[..., object] | None = None) -> Callable[..., object]:
        """Wrap ``function`` to run once per host; it returns None on other processes.

        Example:
            ```python
            @accelerator.on_local_main_process
            def download():
                Path("data").mkdir(exist_ok=True)

            download()
            ```
        """
        return only_when(lambda: self.is_local_main_process, function)

    @overload
    def on_last_process(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]: ...
    @overload
    def on_last_process(self, function: None = None) -> Guard: ...
    def on_last_process(self, function: Callable[..., object] | None = None) -> Callable[..., object]:
        """Wrap ``function`` to run on the last rank only; it returns None on other ranks.

        Example:
            ```python
            @accelerator.on_last_process
            def say():
                print(f"rank {accelerator.process_index} is the last")

            say()
            ```
        """
        return only_when(lambda: self.is_last_process, function)

    @overload
    def on_process(
        self, function: Callable[Parameters, Result], process_index: int | None = None
    ) -> Callable[Parameters, Result | None]: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> Guard: ...
    def on_process(
        self, function: Callable[..., object] | None = None, process_index: int | None = None
    ) -> Callable[..., object]:
        """Wrap ``function`` to run on rank ``process_index`` only; with a single process it always runs.

        Example:
            ```python
            @accelerator.on_process(process_index=1)
            def say():
                print("I am rank 1, or alone")

            say()
            ```
        """
        return only_when(lambda: self.num_processes == 1 or self.process_index == process_index, function)

    @overload
    def on_local_process(
        self, function: Callable[Parameters, Result], local_process_index: int | None = None
    ) -> Callable[Parameters, Result | None]: ...
    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> Guard: ...
    def on_local_process(
        self, function: Callable[..., object] | None = None, local_process_index: int | None = None
    ) -> Callable[..., object]:
        """Wrap ``function`` to run on one local process of every host only; with a single process it always runs.

        Example:
            ```python
            @accelerator.on_local_process(local_process_index=1)
            def say():
                print("the second process of this host, or the only one")

            say()
            ```
        """
        return only_when(lambda: self.num_processes == 1 or self.local_process_index == local_process_index, function)


# -- parts -------------------------------------------------------------------------------------------------


@contextmanager
def split_between_processes(inputs: object, apply_padding: bool = False, world: World | None = None) -> Generator[Any]:
    """Enter a context whose value is this process's part of `inputs`; the first parts may be one longer.

    Lists, tuples, tensors, `datasets.Dataset` and dicts of these are split; every process gets anything else whole.
    With a single process, the value is `inputs` itself.

    Args:
        apply_padding: pad short parts with their last element, so that all have the same length.

    Raises:
        PreparationError: a dict whose values differ in length.
    """
    yield part_of(inputs, world_or_joined(world), apply_padding)


def part_of(inputs: Any, world: World, apply_padding: bool = False) -> Any:
    """Return this process's part of `inputs`, without changing `inputs`."""
    if world.size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        entries = cast("Mapping[Any, Any]", inputs)
        lengths = {key: len(value) for key, value in entries.items()}
        if len(set(lengths.values())) > 1:
            raise PreparationError(
                f"All values of a dict that is split between processes must have the same length, got {lengths}."
            )
        parts = {key: part_of(value, world, apply_padding) for key, value in entries.items()}
        return parts if isinstance(inputs, dict) else type(inputs)(parts)  # pyright: ignore[reportCallIssue]
    if isinstance(inputs, (list, tuple, torch.Tensor)):
        start, end = _bounds(len(inputs), world)
        part = inputs[start:end]
        return _padded(part, inputs, world) if apply_padding else part
    select = getattr(inputs, "select", None)
    if select is not None and type(inputs).__module__.partition(".")[0] == "datasets":
        start, end = _bounds(len(inputs), world)
        indices = list(range(start, end))
        longest = -(-len(inputs) // world.size)
        if apply_padding and len(inputs):
            indices += [indices[-1] if indices else len(inputs) - 1] * (longest - len(indices))
        return select(indices)
    return inputs


def _bounds(length: int, world: World) -> tuple[int, int]:
    share, extras = divmod(length, world.size)
    start = world.rank * share + min(world.rank, extras)
    return start, start + share + (world.rank < extras)


def _padded(part: Any, inputs: Any, world: World) -> Any:
    missing = -(-len(inputs) // world.size) - len(part)
    if isinstance(inputs, torch.Tensor):
        part = send_to_device(part, world.device)
        if missing and len(inputs):
            last = send_to_device(inputs[-1:] if len(part) == 0 else part[-1:], world.device)
            part = torch.cat([part, *[last] * missing])
        return part
    if missing == 0 or len(inputs) == 0:
        return part
    last = part[-1] if len(part) else inputs[-1]
    return part + type(part)([last] * missing)
