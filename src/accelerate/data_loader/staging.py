"""Batches on their way to the device while the one before is in use: a stream of its own, and a bounded queue.

Reading ahead is left to worker processes. Where this process reads by itself, a batch is read when it is asked for, as
ever, because reading draws from the streams that the training loop draws from; its copy still runs beside the work
that the device has been given before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Protocol, TypeVar, final

import torch

from accelerate.devices import DeviceKind, kind_of
from accelerate.nested import recursively_apply, send_to_device

Account = TypeVar("Account")


class Stage(Protocol):
    """A way of bringing batches to a device."""

    def send(self, batch: Any) -> Any:
        """The batch, on its way."""
        ...

    def receive(self, sent: Any) -> Any:
        """A batch that was sent, ready to be used."""
        ...


@final
class DeviceStage:
    """Copies batches to one device on a stream of its own."""

    def __init__(self, kind: DeviceKind, device: torch.device, stream: Any) -> None:
        self._kind, self._device, self._stream = kind, device, stream

    def send(self, batch: Any) -> tuple[Any, Any]:
        """The batch on the device, some time from now; and the event of its arrival."""
        staged = recursively_apply(_pinned, batch)
        with self._kind.in_stream(self._stream):
            sent = send_to_device(staged, self._device, non_blocking=True)
            return sent, self._stream.record_event()

    def receive(self, sent: tuple[Any, Any]) -> Any:
        """A batch that was sent, for work that is queued from now on: that work waits for it, this process doesn't."""
        batch, arrival = sent
        current = self._kind.current_stream(self._device)
        current.wait_event(arrival)
        # The memory belongs to the copying stream, which must not use it again before the current one is done with it.
        recursively_apply(lambda tensor: tensor.record_stream(current), batch)
        return batch


def stage_for(device: torch.device | None) -> DeviceStage | None:
    """A stage for ``device``; None where there is nothing to overlap."""
    if device is None:
        return None
    kind = kind_of(device)
    stream = kind.side_stream(device)
    return None if stream is None else DeviceStage(kind, device, stream)


def staged(
    source: Generator[tuple[Any, Account], None, None], stage: Stage, depth: int
) -> Generator[tuple[Any, Account], None, None]:
    """What ``source`` gives, on the device; up to ``depth`` further batches are on their way."""
    waiting: deque[tuple[tuple[Any, Any], Account]] = deque()
    try:
        for batch, account in source:
            waiting.append((stage.send(batch), account))
            if len(waiting) > depth:
                sent, account = waiting.popleft()
                yield stage.receive(sent), account
        for sent, account in waiting:
            yield stage.receive(sent), account
    finally:
        source.close()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or not torch.accelerator.is_available() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
