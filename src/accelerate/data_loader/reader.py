"""The plan of one pass over a loader's data, and how its batches get to the device, also before they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import torch

from ..nested import send_to_device
from .resume import SavedPosition
from .sampling import BatchInfo

T = TypeVar("T")
Value = TypeVar("Value")

Delivery = tuple[object, BatchInfo]
_HOST: Final = torch.device("cpu")


@final
@dataclass(frozen=True)
class ReadPlan:
    """The batches of one pass over a loader: where they begin, which are padded, and where they go."""

    saved: SavedPosition | None = None  # the position to resume from; None at the beginning of an epoch
    num_skipped: int = 0  # how many of the reader's first batches the user skips
    dp_size: int = 1  # how many data-parallel ranks divide a global batch
    num_first_batches: int = 0  # how many first batches of the epoch a later pass has to know, to pad the last one
    drops_last: bool = False  # an incomplete last global batch is left out
    is_only_reader: bool = False  # this rank reads for all ranks
    device: torch.device | None = None  # None: batches stay where they are read
    non_blocking: bool = False

    @property
    def stays_on_host(self) -> bool:
        """Whether batches are for the host, so those on the host aren't moved."""
        return self.device == _HOST

    def place(self, batch: T) -> T:
        """Return ``batch`` on the device."""
        if self.device is None or (self.stays_on_host and is_on_host(batch)):
            return batch
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)


class Reader(Protocol):
    """One pass over a loader's data."""

    def read(self) -> Generator[Delivery, None, None]:
        """Yield every batch, on the plan's device, with its batch info."""
        ...

    def first_batches(self, num_batches: int, num_rows: int) -> list[object]:
        """Return the first batches of the epoch, up to about ``num_batches`` batches and ``num_rows`` samples.

        Empty if they can't be read again.
        """
        ...


def is_on_host(batch: Any) -> bool:
    """Return whether ``batch`` is a CPU tensor or a plain container of them, which needs no recursive move."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.is_cpu
    if kind is dict:
        batch = batch.values()
    elif kind is not list and kind is not tuple:
        return False
    for item in batch:  # noqa: SIM110  (a generator would cost a call per item, in every step)
        if type(item) is not torch.Tensor or not item.is_cpu:
            return False
    return True


# --------------------------------------------------------------------------------------------------
# Copies of batches to the device before they are used


class DevicePrefetch(Protocol):
    """The interface to copy batches to a device before they are used."""

    def send(self, batch: object, /) -> object:
        """Start to copy ``batch`` to the device."""
        ...

    def receive(self, sent: Any) -> object:
        """Return a batch from :meth:`send`, ready to be used."""
        ...


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
