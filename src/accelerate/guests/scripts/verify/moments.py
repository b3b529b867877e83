"""Moments of tensors that are distributed over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import final

import torch

from ....parallel.state import HeldTensor, held_tensors
from .record import Moments

#: Radians between the places of two elements; no multiple of it is near a multiple of a full turn.
_TURN = 2.399963229728653
#: The integer type whose elements have so many bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Odd numbers with irregular bits (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
_OF_PLACES, _OF_BITS = -0x61C8864680B583EB, -0x40A7B892E31B1A47
_LOW = 2**32 - 1


@final
class Places:
    """The factors of projections, kept by name and region because they are the same in every step.

    Args:
        takes_bits: also sum up hashes of the elements, whose sums have no rounding.
    """

    def __init__(self, *, takes_bits: bool = False) -> None:
        self._takes_bits = takes_bits
        self._known: dict[tuple[str, object], torch.Tensor] = {}

    def factors(self, name: str, held: HeldTensor) -> torch.Tensor:
        """Return the factor of each element that this rank holds: the sine of its place, from a start by `name`."""
        key = (name, (held.shape, held.region))
        if key not in self._known:
            start = zlib.crc32(name.encode()) % 1000
            self._known[key] = torch.sin((_places(held).double() + start) * _TURN)
        return self._known[key]

    def moments_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Moments]:
        """Return the moments of this rank's part of each tensor, plain or sharded; no collective."""
        return self.of_held(held_tensors(dict(tensors)))

    def of_held(self, tensors: list[HeldTensor]) -> dict[str, Moments]:
        """Return the moments of tensors by their first names."""
        return {held.names[0]: self._moments(held) for held in tensors}

    def _moments(self, held: HeldTensor) -> Moments:
        dtype = str(held.dtype).removeprefix("torch.")
        if held.local is None or held.region is None or not held.local.numel():
            return Moments(0, held.num_elements, 0.0, 0.0, 0.0, dtype)
        values = held.local.detach().double().cpu()
        factors = self.factors(held.names[0], held).reshape(values.shape)
        return Moments(
            values.numel(),
            held.num_elements,
            float(values.sum()),
            float(values.square().sum()),
            float((values * factors).sum()),
            dtype,
            _hash_of_bits(held) if self._takes_bits else 0,
        )


def _places(held: HeldTensor) -> torch.Tensor:
    """Return the place in the whole tensor of each element that this rank holds."""
    sizes = held.shape if held.strides is None else (held.num_elements,)
    place = torch.zeros((), dtype=torch.int64)
    for (begin, end), size in zip(held.region or (), sizes, strict=True):
        place = place.unsqueeze(-1) * size + torch.arange(begin, end)
    return place


def _hash_of_bits(held: HeldTensor) -> int:
    """Return the sum over the elements of a hash of their bits and place, modulo 2^64."""
    assert held.local is not None, "the caller has looked"
    values = held.local.detach().cpu().contiguous()
    hashed = values.view(_INTEGERS[values.element_size()]).long() ^ (_places(held).reshape(values.shape) * _OF_PLACES)
    hashed = (hashed ^ (hashed >> 32 & _LOW)) * _OF_BITS
    return int((hashed ^ (hashed >> 32 & _LOW)).sum()) % 2**64
