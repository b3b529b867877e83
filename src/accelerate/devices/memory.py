"""Device memory: copy during computation, release it, recognise out-of-memory errors, retry with a smaller batch."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar, final, overload

import torch

from ..nested import recursively_apply, send_to_device
from . import table

logger: logging.Logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Values = TypeVar("Values")

#: Out-of-memory messages of the devices' allocators, in lower case.
_OUT_OF_MEMORY_MESSAGES: Final = (
    " out of memory",
    "cudnn_status_not_supported",
    "can't allocate memory",
    "pt_devmem allocation failed",
)


@final
class CopyStream:
    """A side stream that copies between host memory and one device, while the device computes."""

    def __init__(self, kind: table.DeviceKind, device: torch.device, stream: torch.Stream) -> None:
        self._kind, self._device, self._stream = kind, device, stream

    def send(self, values: Values) -> tuple[Values, torch.Event]:
        """Start to copy nested ``values`` to the device; return the copies and the event of their completion."""
        pinned = recursively_apply(_pinned, values)
        with self._kind.in_stream(self._stream):
            sent = send_to_device(pinned, self._device, non_blocking=True)
            return sent, self._stream.record_event()

    def receive(self, sent: tuple[Values, torch.Event]) -> Values:
        """Return copies on the device; later work there waits for them, without blocking this process."""
        values, arrival = sent
        current = self._kind.current_stream(self._device)
        current.wait_event(arrival)
        # The memory belongs to the side stream, which must not reuse it before the current stream has used the values.
        recursively_apply(lambda tensor: tensor.record_stream(current), values)
        return values

    def to_host(self, tensor: torch.Tensor, on_host: torch.Tensor | None) -> torch.Tensor:
        """Start to copy a tensor to host memory (into ``on_host`` if it fits), after its queued operations."""
        if on_host is None or on_host.shape != tensor.shape or on_host.dtype != tensor.dtype:
            on_host = torch.empty_like(tensor, device=table.CPU.name, pin_memory=True)
        if tensor.is_cpu:  # as it was loaded
            return on_host.copy_(tensor)
        self._stream.wait_stream(self._kind.current_stream(self._device))
        with self._kind.in_stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return on_host

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._stream.synchronize()


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a new copy stream of ``device``; None if it has no streams."""
    kind = table.kind_of(device)
    stream = kind.side_stream(device)
    return None if stream is None else CopyStream(kind, device, stream)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or not torch.accelerator.is_available() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the cached memory of torch's allocator; collect garbage first if ``garbage_collection``."""
    if garbage_collection:
        gc.collect()
    table.empty_caches()


def release_memory(*objects: object) -> list[None]:
    """Collect garbage, empty the device's cache, and return one None for each object.

    Assign the result to the names of the objects, so that no reference to them is left::

        model, optimizer = release_memory(model, optimizer)

    The memory of the objects themselves is free once the caller's names are gone.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether the exception is an out-of-memory error, on the device or on the host."""
    if isinstance(exception, MemoryError):
        return True
    if not isinstance(exception, RuntimeError):
        return False
    text = str(exception).lower()
    return any(message in text for message in _OUT_OF_MEMORY_MESSAGES)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, Parameters], Result],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[Parameters, Result]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[[Callable[Concatenate[int, Parameters], Result]], Callable[Parameters, Result]]: ...
def find_executable_batch_size(
    function: Callable[..., object] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., object]:
    """Decorate a function to get, as its first argument, a batch size that fits into memory.

    The function is called with ``starting_batch_size``. Each time memory runs out, it is called again with a smaller
    size: nine tenths, or the result of ``reduce_batch_size_fn`` (called with the failed size, if it takes an argument).
    The next call starts with the size that worked. Each process finds its batch size on its own.

    Works with and without parentheses::

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size, model): ...

        train(model)

    Raises:
        TypeError: the caller passed a batch size of its own.
        RuntimeError: no batch size is small enough.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    run: Callable[..., object] = function
    name = getattr(function, "__name__", repr(function))
    smaller = _reducer(reduce_batch_size_fn)
    batch_size = starting_batch_size

    @functools.wraps(function)
    def sized(*args: object, **kwargs: object) -> object:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        _refuse_own_batch_size(run, name, args)
        while batch_size > 0:
            try:
                return run(batch_size, *args, **kwargs)
            except Exception as error:  # raised again unless memory ran out
                if not should_reduce_batch_size(error):
                    raise
            # Outside of the handler, because inside it the traceback still refers to the tensors of the failed call.
            clear_device_cache(garbage_collection=True)
            before, batch_size = batch_size, smaller(batch_size)
            logger.info("%s ran out of memory with batch size %d; trying %d.", name, before, batch_size)
        raise RuntimeError(
            f"No executable batch size found, reached zero: `{name}` ran out of memory with every size from "
            f"{starting_batch_size} down. Free memory before the call, or use a smaller model."
        )

    return sized


def _reducer(custom: Callable[..., int] | None) -> Callable[[int], int]:
    if custom is None:
        return lambda batch_size: int(batch_size * 0.9)
    try:
        takes_size = bool(inspect.signature(custom).parameters)
    except ValueError:  # a builtin without a signature
        takes_size = False
    return custom if takes_size else lambda _batch_size: custom()


def _refuse_own_batch_size(function: Callable[..., object], name: str, args: tuple[object, ...]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    if len(parameters) < len(args) + 1:
        shown = ", ".join(f"{p.name}={value!r}" for p, value in zip(parameters[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called. Remove it, the "
            f"decorator passes one already: `{name}({shown})`"
        )


def convert_bytes(size: float) -> str:
    """Format a size in its largest whole unit: ``convert_bytes(1536)`` is ``"1.5 KB"``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
