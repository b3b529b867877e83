"""Several tensors as one message, and the answers of all ranks taken apart again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final, final

import torch

#: The shape, dtype and device of each tensor of a message, in order.
Description = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

_LARGEST_BYTES: Final = 4 << 20  # up to here, copying tensors into one message costs less than a message each
_KEPT_BYTES: Final = 2 << 20  # memory that one kind of message keeps for its next time
_NUM_KINDS: Final = 8
_HEADER_BYTES: Final = 8
_ALIGNMENT_BYTES: Final = 8


@final
class Message:
    """Tensors of one description in one run of bytes, to be gathered from ``size`` ranks.

    A message begins with a sum of its description: equally long ones of other tensors are not mixed up. What is short
    is copied into and out of memory that stays from call to call; results always lie in memory of their own.
    """

    def __init__(self, description: Description, size: int) -> None:
        self._description = description
        self._size = size
        self._device = description[0][2]
        self._spans: list[tuple[int, int]] = []
        position = _HEADER_BYTES
        for shape, dtype, _ in description:
            num_bytes = shape.numel() * dtype.itemsize
            self._spans.append((position, position + num_bytes))
            position += num_bytes + -num_bytes % _ALIGNMENT_BYTES
        self._num_bytes = position
        text = repr([(tuple(shape), str(dtype)) for shape, dtype, _ in description])
        self._sum = zlib.crc32(text.encode())
        self._kept = self._memory() if (size + 1) * position <= _KEPT_BYTES else None

    def pack(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The message, and room for those of all ranks."""
        self._here = self._kept or self._memory()
        if any(tensor.requires_grad for tensor in tensors):
            tensors = [tensor.detach() for tensor in tensors]
        torch._foreach_copy_(self._here.slots, tensors)  # pyright: ignore[reportPrivateImportUsage]
        return self._here.own, self._here.joined

    def unpack(self) -> list[torch.Tensor] | None:
        """Every tensor joined with those of all ranks, once they are there; None when a rank sent other tensors."""
        here = self._here
        if not self._kept:
            del self._here
        if here.joined.is_cpu and here.sums.tolist() != [self._sum] * self._size:
            return None
        return [take() for take in here.takers]

    def _memory(self) -> _Memory:
        own = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        own[:_HEADER_BYTES].view(torch.int64).fill_(self._sum)
        joined = torch.empty(self._size * self._num_bytes, dtype=torch.uint8, device=self._device)
        rows = joined.view(self._size, -1)
        slots: list[torch.Tensor] = []
        takers: list[Callable[[], torch.Tensor]] = []
        for (start, end), (shape, dtype, _) in zip(self._spans, self._description, strict=True):
            slots.append(own[start:end].view(dtype).view(shape))
            takers.append(_taker(rows[:, start:end].view(dtype).view(self._size, *shape)))
        return _Memory(own, joined, rows.view(torch.int64)[:, 0], slots, takers)


@final
class _Memory:
    def __init__(
        self,
        own: torch.Tensor,
        joined: torch.Tensor,
        sums: torch.Tensor,
        slots: list[torch.Tensor],
        takers: list[Callable[[], torch.Tensor]],
    ) -> None:
        self.own, self.joined, self.sums, self.slots, self.takers = own, joined, sums, slots, takers


def _taker(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What copies the ranks' tensors, one per row, into one after the other: a single call, into memory of its own."""
    if rows.ndim == 1:
        return partial(rows.clone, memory_format=torch.contiguous_format)
    return partial(torch.cat, list(rows.unbind(0)))


def message_for(tensors: Sequence[torch.Tensor], size: int) -> Message | None:
    """How these tensors travel as one message among ``size`` ranks; None where one each is better."""
    return _message_for(tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]), size)


@lru_cache(maxsize=_NUM_KINDS)
def _message_for(description: Description, size: int) -> Message | None:
    if len(description) < 2 or any(device != description[0][2] for _, _, device in description):
        return None
    if any(dtype.is_complex for _, dtype, _ in description):
        return None
    if sum(shape.numel() * dtype.itemsize for shape, dtype, _ in description) > _LARGEST_BYTES:
        return None
    return Message(description, size)
