"""Changes of weights as bytes: float32, 8 bits or 2 bits per value, with one float32 scale per block.

All operations are elementwise or inside of one block of one row, so every rank decodes the same bytes to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch.nn import functional

#: Values that share a scale.
BLOCK: Final = 256
#: The distance of the four levels of 2 bits, by the root mean square of a block: the least error of normal values.
_DISTANCE: Final = 0.9957
_SCALE_BYTES: Final = 4


@final
@dataclass(frozen=True)
class Codec:
    """One kind of compression of flat float32 values.

    Attributes:
        encode: values -> bytes.
        decode: bytes and the number of values -> values.
        is_exact: whether decoding gives the values again.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int], torch.Tensor]
    is_exact: bool = False


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    return functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def _with_scales(scales: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.cat([_bytes_of(scales), _bytes_of(numbers)])


def _split(encoded: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the numbers of ``size`` encoded values."""
    end = -(-size // BLOCK) * _SCALE_BYTES
    return encoded[:end].clone().view(torch.float32), encoded[end:]


def _divided(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)


def _encode_8_bits(values: torch.Tensor) -> torch.Tensor:
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(1) / 127
    numbers = _divided(blocks, scales).round().clamp(-127, 127).to(torch.int8)
    return _with_scales(scales, numbers.view(-1)[: values.numel()])


def _decode_8_bits(encoded: torch.Tensor, size: int) -> torch.Tensor:
    scales, numbers = _split(encoded, size)
    blocks = _in_blocks(numbers.view(torch.int8).to(torch.float32))
    return (blocks * scales.unsqueeze(1)).view(-1)[:size]


def _encode_2_bits(values: torch.Tensor) -> torch.Tensor:
    blocks = _in_blocks(values)
    counts = torch.full_like(blocks[:, 0], BLOCK)
    counts[-1:] -= -values.numel() % BLOCK
    scales = (blocks.square().sum(1) / counts).sqrt() * _DISTANCE
    numbers = (_divided(blocks, scales).floor().clamp(-2, 1) + 2).to(torch.uint8)
    quads = numbers.view(-1, 4)[: -(-values.numel() // 4)]
    return _with_scales(scales, quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6)


def _decode_2_bits(encoded: torch.Tensor, size: int) -> torch.Tensor:
    scales, quads = _split(encoded, size)
    numbers = torch.stack([quads >> shift & 3 for shift in (0, 2, 4, 6)], dim=1).view(-1)
    blocks = _in_blocks(numbers.to(torch.float32) - 1.5)
    return (blocks * scales.unsqueeze(1)).view(-1)[:size]


#: The argument ``compression`` -> the codec.
CODECS: Final[dict[str, Codec]] = {
    "none": Codec(
        lambda values: values.view(torch.uint8), lambda encoded, _: encoded.clone().view(torch.float32), True
    ),
    "int8": Codec(_encode_8_bits, _decode_8_bits),
    "2bit": Codec(_encode_2_bits, _decode_2_bits),
}
