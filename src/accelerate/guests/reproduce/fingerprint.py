"""A fingerprint of tensors: a sum of their mixed bits on their device, and a hash over all sums.

The sums are of 64-bit integers, so their order doesn't matter: any device and any number of threads give the same ones.
Only one number per tensor is read from the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import torch

#: The number of 64-bit words that are mixed at once; their temporary memory is twice 8 MB.
_NUM_WORDS: Final = 1 << 20
_FACTOR: Final = 0x9E3779B97F4A7C15
_DIGITS: Final = 32


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return 32 hexadecimal digits for the bits, dtypes and shapes of tensors; "" if none has bits that can be read.

    A rank sees its own shard of a sharded tensor.
    """
    with torch.no_grad():
        found = [(name, tensor, flat) for name, tensor in named if (flat := _bytes_of(tensor)) is not None]
        if not found:
            return ""
        sums = [_sum(group) for group in _groups(flat for *_, flat in found)]
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    heads = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor, _ in found]
    return hashlib.sha256(repr((heads, values)).encode()).hexdigest()[:_DIGITS]


def weights_of(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of models by name."""
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{number}.{name}", tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of this rank's part of ``tensor``, of shape [bytes]; None if they can't be read."""
    to_local: Any = getattr(tensor, "to_local", None)
    plain: torch.Tensor = tensor if to_local is None else to_local()
    is_plain = type(plain) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or plain.is_meta or plain.is_quantized or plain.layout is not torch.strided:
        return None
    values = plain.detach()
    if values.is_conj() or values.is_neg():
        values = values.resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.contiguous().view(-1).view(torch.uint8)


def _groups(flats: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join the bytes of small tensors of one device, of which each would cost as much as a large one."""
    group: list[torch.Tensor] = []
    size = 0
    for flat in flats:
        if group and (flat.device != group[0].device or size + len(flat) > 8 * _NUM_WORDS):
            yield torch.cat(group) if len(group) > 1 else group[0]
            group, size = [], 0
        group.append(flat)
        size += len(flat)
    yield torch.cat(group) if len(group) > 1 else group[0]


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of all words of ``flat``, each mixed with its place, of shape []."""
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    end = len(flat) - len(flat) % 8
    words, places = flat[:end].view(torch.int64), _places(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, part in enumerate((*words.split(_NUM_WORDS), flat[end:].long())):
        mixed = part * places[: len(part)]
        mixed ^= mixed >> 29  # else changes of the highest bits alone would cancel
        total += mixed.sum() * _signed((2 * number + 1) * _FACTOR)
    return total


@cache
def _places(device: torch.device) -> torch.Tensor:
    """Return an odd factor for each place, of shape [words]."""
    mixed = torch.arange(1, _NUM_WORDS + 1, device=device) * _signed(_FACTOR)
    mixed ^= mixed >> 32
    mixed *= _signed(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> 29)) | 1


def _signed(number: int) -> int:
    """Return the signed 64-bit integer with the lowest 64 bits of ``number``."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number
