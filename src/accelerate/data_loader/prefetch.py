"""Copy batches to the device before they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Protocol, TypeVar, final

import torch

from ..devices.table import DeviceKind, kind_of
from ..nested import recursively_apply, send_to_device

Value = TypeVar("Value")


class DevicePrefetch(Protocol):
    """The interface to copy batches to a device before they are used."""

    def send(self, batch: object) -> object:
        """Start to copy ``batch`` to the device."""
        ...

    def receive(self, sent: Any) -> object:
        """Return a batch from :meth:`send`, ready to be used."""
        ...


@final
class StreamPrefetch:
    """A device prefetch that copies batches on a side stream."""

    def __init__(self, kind: DeviceKind, device: torch.device, stream: torch.Stream) -> None:
        self._kind, self._device, self._stream = kind, device, stream

    def send(self, batch: object) -> tuple[object, torch.Event]:
        """Start to copy ``batch``; return the copy and the event of its completion."""
        pinned = recursively_apply(_pinned, batch)
        with self._kind.in_stream(self._stream):
            sent = send_to_device(pinned, self._device, non_blocking=True)
            return sent, self._stream.record_event()

    def receive(self, sent: tuple[object, torch.Event]) -> object:
        """Return a copied batch; later work on the device waits for the copy, without blocking this process."""
        batch, arrival = sent
        current = self._kind.current_stream(self._device)
        current.wait_event(arrival)
        # The memory belongs to the copying stream, which must not reuse it before the current stream has used the
        # batch.
        recursively_apply(lambda tensor: tensor.record_stream(current), batch)
        return batch


def prefetch_for(device: torch.device | None) -> StreamPrefetch | None:
    """Return a device prefetch for ``device``; None if it has no side stream."""
    if device is None:
        return None
    kind = kind_of(device)
    stream = kind.side_stream(device)
    return None if stream is None else StreamPrefetch(kind, device, stream)


def prefetched(
    source: Generator[tuple[object, Value], None, None], device_prefetch: DevicePrefetch, depth: int
) -> Generator[tuple[object, Value], None, None]:
    """Yield the batches of ``source`` on the device, while up to ``depth`` further batches are being copied."""
    waiting: deque[tuple[object, Value]] = deque()
    try:
        for batch, batch_info in source:
            waiting.append((device_prefetch.send(batch), batch_info))
            if len(waiting) > depth:
                sent, batch_info = waiting.popleft()
                yield device_prefetch.receive(sent), batch_info
        for sent, batch_info in waiting:
            yield device_prefetch.receive(sent), batch_info
    finally:
        source.close()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or not torch.accelerator.is_available() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
