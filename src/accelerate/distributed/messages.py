"""Tensors packed into one message for an all-gather, and the length of the next message."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, Final, cast, final

import torch

from ..torch_private.modules import copy_each

#: The shape, dtype and device of each tensor of a message, in order.
Description = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

_LARGEST_BYTES: Final = 4 << 20  # up to here, copying tensors into one message costs less than one message per tensor
_SHORTEST_BYTES: Final = 4 << 10  # up to here, messages of any length cost the same
_REUSED_BYTES: Final = 2 << 20  # memory that one kind of message reuses
_NUM_KINDS: Final = 12
_NUM_LENGTHS: Final = 64
_HEADER_BYTES: Final = 8
_ALIGNMENT_BYTES: Final = 8


@final
class Message:
    """The layout of tensors with one description in a byte buffer, for an all-gather over ``size`` ranks.

    A message begins with a checksum of the operation and the description, to detect ranks that disagree. Short messages
    reuse their buffers from call to call; results are always in new memory.

    Args:
        length: of the message, in bytes; if the tensors don't fit, only the checksum is sent. By default, as long as
            the tensors need.
    """

    def __init__(self, description: Description, size: int, operation: str = "", length: int = 0) -> None:
        self._description = description
        self._size = size
        self._spans: list[tuple[int, int]] = []
        position = _HEADER_BYTES
        for shape, dtype, _ in description:
            num_bytes = shape.numel() * dtype.itemsize
            self._spans.append((position, position + num_bytes))
            position += num_bytes + -num_bytes % _ALIGNMENT_BYTES
        self.is_whole: bool = _is_packable(description) and (length == 0 or position <= length)
        self._num_bytes = length or position
        self._device = description[0][2] if self.is_whole and description else torch.device("cpu")
        #: The length needed to hold the tensors, if one message is faster.
        self.needed_bytes: int = position if _is_packable(description) else _SHORTEST_BYTES
        self._checksum = checksum(operation, [(tuple(shape), dtype) for shape, dtype, _ in description])
        #: Equal for the messages of the same call in each iteration of a loop.
        self.kind: int = checksum(operation, [(len(shape), dtype) for shape, dtype, _ in description])
        self._buffers = self._make_buffers() if (size + 1) * self._num_bytes <= _REUSED_BYTES else None

    def buffers(self) -> Buffers:
        """Return the memory for one exchange of the message."""
        return self._buffers or self._make_buffers()

    def _make_buffers(self) -> Buffers:
        own = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        own[:_HEADER_BYTES].view(torch.int64).fill_(self._checksum)
        joined = torch.empty(self._size * self._num_bytes, dtype=torch.uint8, device=self._device)
        rows = joined.view(self._size, -1)
        slots: list[torch.Tensor] = []
        rank_rows: list[torch.Tensor] = []
        for (start, end), (shape, dtype, _) in zip(self._spans, self._description, strict=True):
            if self.is_whole:
                slots.append(own[start:end].view(dtype).view(shape))
                rank_rows.append(rows[:, start:end].view(dtype).view(self._size, *shape))
        checksums = rows[:, :_HEADER_BYTES].view(torch.int64)[:, 0]
        return Buffers(own, joined, checksums, [self._checksum] * self._size, slots, rank_rows)


@final
class Buffers:
    """The memory of one exchange: this rank's message, and those of all ranks."""

    def __init__(
        self,
        own: torch.Tensor,
        joined: torch.Tensor,
        checksums: torch.Tensor,
        expected: list[int],
        slots: list[torch.Tensor],
        rank_rows: list[torch.Tensor],
    ) -> None:
        self.own: torch.Tensor = own
        self.joined: torch.Tensor = joined
        self.rank_rows = rank_rows  # by tensor: [size, *shape], overwritten by the next exchange
        self._checksums, self._expected, self._slots = checksums, expected, slots
        self._gatherers = [_gatherer(rows) for rows in rank_rows]

    def pack(self, tensors: list[torch.Tensor]) -> None:
        """Copy ``tensors`` into this rank's message, if it carries any."""
        if not self._slots:
            return
        if any(tensor.requires_grad for tensor in tensors):
            tensors = [tensor.detach() for tensor in tensors]
        copy_each(self._slots, tensors)

    def agree(self) -> bool:
        """Return whether all ranks sent the same checksum; call it after the exchange."""
        return self._checksums.tolist() == self._expected

    def unpack(self) -> list[torch.Tensor]:
        """Return each tensor concatenated over all ranks; call it after the exchange."""
        return [take() for take in self._gatherers]


def places_of(data: object, place: str = "") -> list[str]:
    """Return the place of each tensor in ``data``, such as ``.inputs.0``, in order.

    Ranks with equal places combine the same tensors. A key whose text may differ between processes counts as its type.
    """
    if isinstance(data, torch.Tensor):
        return [place]
    items: Iterable[tuple[object, object]] = ()
    if isinstance(data, (list, tuple)):
        items = enumerate(cast("Sequence[object]", data))
    elif isinstance(data, Mapping):
        items = cast("Mapping[object, object]", data).items()
    elif is_dataclass(data):
        items = [(field.name, getattr(data, field.name, None)) for field in fields(data)]
    found: list[str] = []
    for key, item in items:
        name = f"{place}.{key if isinstance(key, (str, int)) else type(key).__name__}"
        found += [name] if isinstance(item, torch.Tensor) else places_of(item, name)
    return found


def checksum(*values: object) -> int:
    """Return a CRC-32 checksum of ``values``."""
    return zlib.crc32(repr(values).encode())


def _gatherer(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that concatenates the ranks' tensors, one per row, into new memory."""
    if rows.ndim == 1:
        return partial(rows.clone, memory_format=torch.contiguous_format)
    return partial(torch.cat, list(rows.unbind(0)))


def _is_packable(description: Description) -> bool:
    """Return whether such tensors are sent faster in one message than one by one."""
    if any(device != description[0][2] or dtype.is_complex or -1 in shape for shape, dtype, device in description):
        return False
    return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in description) <= _LARGEST_BYTES


def describe(tensors: Sequence[torch.Tensor], *, plain: bool) -> Description:
    """Return the shapes, dtypes and devices; unless ``plain``, mark the tensors as not packable."""
    if plain:
        return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])
    return tuple([(torch.Size((*_shape_of(tensor), -1)), tensor.dtype, tensor.device) for tensor in tensors])


def _shape_of(tensor: Any) -> Sequence[int]:
    return () if getattr(tensor, "is_nested", False) else tensor.shape


@lru_cache(maxsize=_NUM_KINDS)
def message_for(description: Description, size: int, operation: str = "", length: int = 0) -> Message:
    """Return the cached layout of tensors with this description as one message among ``size`` ranks."""
    return Message(description, size, operation, length)


def joined_message_for(tensors: Sequence[torch.Tensor], size: int) -> Message | None:
    """Return the layout of these tensors as one message that fits them; None if one message per tensor is better."""
    description = describe(tensors, plain=True)
    return message_for(description, size) if len(description) > 1 and _is_packable(description) else None


@final
class MessageLengths:
    """The length of the first message of the next operation among the ranks of a group: the same on every rank.

    Gloo aborts a process that receives more bytes than it expects, so the length can't depend on this rank's next
    tensors. It is predicted from what all ranks have seen: the kind of the last operation, and the bytes needed by the
    operation that followed this kind the last time. So in a loop every operation is a single message that holds its
    tensors. If the prediction is too short, the tensors follow in a second message.
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._last_kind = 0

    @property
    def next(self) -> int:
        """The length of the next first message, in bytes."""
        return self._after.get(self._last_kind, _SHORTEST_BYTES)

    def note(self, kind: int, needed_bytes: int) -> None:
        """Record the operation that all ranks have just agreed on."""
        if len(self._after) >= _NUM_LENGTHS:
            self._after.clear()
        self._after[self._last_kind] = _rounded(needed_bytes)
        self._last_kind = kind


def _rounded(num_bytes: int) -> int:
    """Round up by at most an eighth, so that slightly different shapes get one length."""
    if num_bytes <= _SHORTEST_BYTES:
        return _SHORTEST_BYTES
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step
