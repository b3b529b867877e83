"""Moments of tensors that are distributed over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import final

import torch

from ....parallel.held_tensors import HeldTensor, held_tensors
from .record import Moments

#: Radians between the places of two elements; no multiple of it is near a multiple of a full turn.
_TURN = 2.399963229728653


@final
class Places:
    """The factors of projections, kept by name and region because they are the same in every step."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, object], torch.Tensor] = {}

    def factors(self, name: str, held: HeldTensor) -> torch.Tensor:
        """Return the factor of each element that this rank holds: the sine of its place, from a start by `name`."""
        region = held.region or ()
        key = (name, (held.shape, region))
        if key not in self._known:
            sizes = held.shape if held.strides is None else (held.num_elements,)
            place = torch.zeros((), dtype=torch.int64)
            for (begin, end), size in zip(region, sizes, strict=True):
                place = place.unsqueeze(-1) * size + torch.arange(begin, end)
            start = zlib.crc32(name.encode()) % 1000
            self._known[key] = torch.sin((place.double() + start) * _TURN)
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
        )
