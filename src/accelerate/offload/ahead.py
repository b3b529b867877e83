"""The weights of the modules that run next, read while this one computes.

Which module follows which is learnt while the model runs for the first time. On the host the kernel is told to read
what is mapped, and a thread reads other files. For an accelerator the thread fills page-locked buffers and copies from
there on a stream of its own. What has been read and isn't used yet is bounded by the largest module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol, final

import torch

from ..devices import CPU

Unit = tuple[str, ...]  # the names of weights that are needed together

#: Smaller units are read when they are needed: handing them to the thread would take longer.
SMALLEST_UNIT_BYTES: Final = 256 << 10
#: May always be read ahead, however small the modules are.
SMALLEST_WINDOW_BYTES: Final = 16 << 20
MOST_UNITS_AHEAD: Final = 16


class Weights(Protocol):
    """Where weights wait."""

    def __getitem__(self, key: str, /) -> torch.Tensor: ...

    def num_bytes(self, key: str, /) -> int:
        """The bytes of a weight, without reading it."""
        ...

    def will_need(self, keys: Sequence[str], /) -> bool:
        """Whether the kernel reads all of these in the background from now on."""
        ...

    def release(self, keys: Sequence[str], /) -> None:
        """What was read of these doesn't count as memory any more."""
        ...


@final
class Lookahead:
    """Reads one unit after the other, and those that are likely to follow before they are asked for."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._following: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._sizes: dict[Unit, int] = {}
        #: What is on its way: by the thread, or (None) by the kernel.
        self._coming: dict[tuple[Unit, torch.device], Future[_Arrival] | None] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._channels: dict[torch.device, _Channel] = {}
        self.num_foreseen = 0  # units that were there, or on their way, when they were asked for

    def fetch(self, unit: Unit, device: torch.device) -> list[torch.Tensor]:
        """The weights of a unit on the device; the next ones are on their way."""
        if self._last is not None:
            self._following[self._last] = unit
        self._last = unit
        self.num_bytes(unit)
        self.num_foreseen += (unit, device) in self._coming
        coming = self._coming.pop((unit, device), None)
        arrival = self._read_now(unit, device) if coming is None else coming.result()
        self._look_ahead(unit, device)
        return arrival.taken()

    def num_bytes(self, unit: Unit) -> int:
        """The bytes of a unit."""
        found = self._sizes.get(unit)
        if found is None:
            found = self._sizes[unit] = sum(map(self._weights.num_bytes, unit))
        return found

    def _read_now(self, unit: Unit, device: torch.device) -> _Arrival:
        values = [self._weights[key] for key in unit]
        if device.type != CPU.name:
            values = [value.to(device, non_blocking=True) for value in values]
        return _Arrival(values)

    def _look_ahead(self, unit: Unit, device: torch.device) -> None:
        window = list(self._window(unit))
        for key in [key for key in self._coming if key[0] not in window]:
            coming = self._coming.pop(key)
            if coming is not None:  # the model took another way
                coming.cancel()
        for ahead in window:
            if (ahead, device) in self._coming:
                continue
            if device.type == CPU.name and self._weights.will_need(ahead):
                self._coming[ahead, device] = None
                continue
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded-weights")
            self._coming[ahead, device] = self._thread.submit(self._read_ahead, ahead, device)

    def _window(self, unit: Unit) -> Iterator[Unit]:
        """The units that are likely to follow, as many as may be in memory."""
        left = max(max(self._sizes.values(), default=0), SMALLEST_WINDOW_BYTES)
        for _ in range(MOST_UNITS_AHEAD):
            following = self._following.get(unit)
            if following is None:
                return
            unit, size = following, self.num_bytes(following)
            if size < SMALLEST_UNIT_BYTES:
                continue
            left -= size
            if left < 0:
                return
            yield unit

    def _read_ahead(self, unit: Unit, device: torch.device) -> _Arrival:
        values = [self._weights[key] for key in unit]
        if device.type == CPU.name:
            return _Arrival(values)
        if device not in self._channels:
            self._channels[device] = _Channel(device)
        arrival = self._channels[device].send(values)
        self._weights.release(unit)
        return arrival


def page_locked(num_bytes: int) -> torch.Tensor:
    """Host memory from which an accelerator can copy by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@final
class _Arrival:
    """Weights that have been read, or are being copied to an accelerator."""

    def __init__(self, values: list[torch.Tensor], module: Any = None, done: Any = None) -> None:
        self._values = values
        self._module = module
        self._done = done

    def taken(self) -> list[torch.Tensor]:
        """The weights, safe to use for what is queued on the current stream from here on."""
        if self._done is not None:
            stream = self._module.current_stream(self._values[0].device)
            stream.wait_event(self._done)
            for value in self._values:
                value.record_stream(stream)
        return self._values


@final
class _Channel:
    """A stream to one accelerator, fed from two page-locked buffers in turn."""

    NUM_BUFFERS: Final = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * self.NUM_BUFFERS
        self._sent: list[Any] = [None] * self.NUM_BUFFERS
        self._turn = 0

    def send(self, values: list[torch.Tensor]) -> _Arrival:
        """Copies on the device, complete when the arrival's event is."""
        self._turn = (self._turn + 1) % self.NUM_BUFFERS
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()  # the buffer is still being read
        waiting = self._staged(values)
        with self._module.stream(self._stream):
            copies = [value.to(self._device, non_blocking=True) for value in waiting]
            done = self._module.Event()
            done.record(self._stream)
        self._sent[self._turn] = done
        return _Arrival(copies, self._module, done)

    def _staged(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values in this turn's buffer."""
        starts, end = [], 0
        for value in values:
            starts.append(end)
            end += -(-value.numel() * value.element_size() // 64) * 64
        if self._buffers[self._turn].numel() < end:
            self._buffers[self._turn] = page_locked(end)
        buffer = self._buffers[self._turn]
        staged = []
        for value, start in zip(values, starts, strict=True):
            num_bytes = value.numel() * value.element_size()
            place = buffer[start : start + num_bytes].view(value.dtype).view(value.shape)
            staged.append(place.copy_(value))
        return staged
