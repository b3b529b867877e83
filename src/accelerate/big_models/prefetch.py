"""Prefetching of offloaded weights: read the weights of the next modules while the current one computes. Internal.

The first run of the model records the order of its modules. On the host, the kernel reads mapped files and a thread
reads other files. For an accelerator, the thread fills pinned buffers and copies them on its own stream. The size of
prefetched weights is bounded by the largest module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol, final

import torch

from ..devices.memory import CopyStream, copy_stream
from ..devices.table import CPU

Unit = tuple[str, ...]  # the names of weights that are needed together
Receive = Callable[[], list[torch.Tensor]]  # returns weights that were read, or are being copied to an accelerator

#: Smaller units are read when they are needed, because passing them to the thread would take longer.
MIN_UNIT_BYTES: Final = 256 << 10
#: The number of bytes that may always be prefetched, even if modules are smaller.
MIN_PREFETCH_BYTES: Final = 16 << 20
MAX_PREFETCHED_UNITS: Final = 16


class WeightStore(Protocol):
    """A store of offloaded weights by name."""

    def __getitem__(self, key: str, /) -> torch.Tensor: ...

    def num_bytes(self, key: str, /) -> int:
        """Return the bytes of a weight, without reading it."""
        ...

    def will_need(self, keys: Sequence[str], /) -> bool:
        """Tell the kernel to read these weights in the background; return whether it can for all of them."""
        ...

    def release(self, keys: Sequence[str], /) -> None:
        """Free the memory that was read for these weights."""
        ...


@final
class WeightPrefetcher:
    """A reader of weight units that prefetches in the order of the model's previous run."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._successors: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._sizes: dict[Unit, int] = {}
        #: Units being read: by the thread, or (None) by the kernel.
        self._in_flight: dict[tuple[Unit, torch.device], Future[Receive] | None] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._copies: dict[torch.device, _StagedCopies] = {}
        self.num_prefetched: int = 0  # units that were read, or being read, when they were fetched

    def fetch(self, unit: Unit, device: torch.device) -> list[torch.Tensor]:
        """Return the weights of a unit on the device, and start to prefetch the next units."""
        if self._last is not None:
            self._successors[self._last] = unit
        self._last = unit
        self.num_bytes(unit)
        self.num_prefetched += (unit, device) in self._in_flight
        future = self._in_flight.pop((unit, device), None)
        receive = self._read_now(unit, device) if future is None else future.result()
        self._prefetch_following(unit, device)
        return receive()

    def num_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit."""
        found = self._sizes.get(unit)
        if found is None:
            found = self._sizes[unit] = sum(map(self._weights.num_bytes, unit))
        return found

    def _read_now(self, unit: Unit, device: torch.device) -> Receive:
        values = [self._weights[key] for key in unit]
        if device.type != CPU.name:
            values = [value.to(device, non_blocking=True) for value in values]
        return lambda: values

    def _prefetch_following(self, unit: Unit, device: torch.device) -> None:
        window = list(self._window(unit))
        for key in [key for key in self._in_flight if key[0] not in window]:
            future = self._in_flight.pop(key)
            if future is not None:  # the model runs in another order
                future.cancel()
        for following in window:
            if (following, device) in self._in_flight:
                continue
            if device.type == CPU.name and self._weights.will_need(following):
                self._in_flight[following, device] = None
                continue
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded-weights")
            self._in_flight[following, device] = self._thread.submit(self._prefetch, following, device)

    def _window(self, unit: Unit) -> Iterator[Unit]:
        """Yield the units that probably follow, within the memory limit for prefetching."""
        left = max(max(self._sizes.values(), default=0), MIN_PREFETCH_BYTES)
        for _ in range(MAX_PREFETCHED_UNITS):
            following = self._successors.get(unit)
            if following is None:
                return
            unit, size = following, self.num_bytes(following)
            if size < MIN_UNIT_BYTES:
                continue
            left -= size
            if left < 0:
                return
            yield unit

    def _prefetch(self, unit: Unit, device: torch.device) -> Receive:
        if device not in self._copies:
            stream = copy_stream(device)
            if stream is None:
                return self._read_now(unit, device)
            self._copies[device] = _StagedCopies(stream)
        copies = self._copies[device]
        sent = copies.send([self._weights[key] for key in unit])
        self._weights.release(unit)
        return partial(copies.stream.receive, sent)


def pinned_buffer(num_bytes: int) -> torch.Tensor:
    """Allocate pinned host memory, from which an accelerator can copy asynchronously."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@final
class _StagedCopies:
    """Copies of weights to one accelerator, through two pinned buffers used in turn."""

    NUM_BUFFERS: Final = 2

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * self.NUM_BUFFERS
        self._copied: list[torch.Event | None] = [None] * self.NUM_BUFFERS
        self._turn = 0

    def send(self, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event]:
        """Start to copy the values to the device; return what the stream receives."""
        self._turn = (self._turn + 1) % self.NUM_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # the buffer is still being read
        sent = self.stream.send(self._staged(values))
        self._copied[self._turn] = sent[1]
        return sent

    def _staged(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the values into the current pinned buffer, and return views of it."""
        starts, end = [], 0
        for value in values:
            starts.append(end)
            end += -(-value.numel() * value.element_size() // 64) * 64
        if self._buffers[self._turn].numel() < end:
            self._buffers[self._turn] = pinned_buffer(end)
        buffer = self._buffers[self._turn]
        staged = []
        for value, start in zip(values, starts, strict=True):
            num_bytes = value.numel() * value.element_size()
            target = buffer[start : start + num_bytes].view(value.dtype).view(value.shape)
            staged.append(target.copy_(value))
        return staged
