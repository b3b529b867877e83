"""A shuffled order that is computed sample by sample instead of being kept: any place of it costs the same.

The place is sent through a Feistel network, which maps a power of two onto itself in an order that looks random;
where the image lies beyond the dataset it is sent through again, until it lies inside (cycle walking). Each sample
comes exactly once, and nothing is stored but the keys of the rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from typing import Final, cast, final

import torch
from torch.utils.data import Sampler

NUM_ROUNDS: Final = 6  # even: the halves are then where they were
#: Fewer samples than this are simply shuffled: a network of so few bits has too few orders.
SMALLEST_NETWORK: Final = 1 << 16
_CHUNK: Final = 4096
# The multipliers of a 64-bit mixer (splitmix64), as the signed numbers that torch multiplies.
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


@final
class Permutation:
    """One order of the numbers below ``size``, decided by ``seed``."""

    def __init__(self, size: int, seed: int) -> None:
        if not 0 <= size < 1 << 62:
            raise ValueError(f"A permutation of {size} numbers can't be made: at least 0, below 2 to the power of 62.")
        self.size = size
        self._shuffled: torch.Tensor | None = None
        if size < SMALLEST_NETWORK:
            self._shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(seed % (1 << 63)))
            return
        num_bits = (size - 1).bit_length()
        self._widths = (num_bits // 2, num_bits - num_bits // 2)
        keys = hashlib.blake2b(f"{size}/{seed}".encode(), digest_size=8 * NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(keys[8 * n : 8 * n + 8], "little", signed=True) for n in range(NUM_ROUNDS)]

    def at(self, start: int, stop: int) -> torch.Tensor:
        """The numbers at the places ``start`` to ``stop`` of the order."""
        stop = min(stop, self.size)
        if self._shuffled is not None:
            return self._shuffled[start:stop]
        image = self._through(torch.arange(start, max(stop, start)))
        while len(outside := (image >= self.size).nonzero().flatten()):
            image[outside] = self._through(image[outside])
        return image

    def _through(self, numbers: torch.Tensor) -> torch.Tensor:
        left_width, right_width = self._widths
        left, right = numbers >> right_width, numbers & ((1 << right_width) - 1)
        for key in self._keys:
            # The halves change places, and with them their widths.
            left, right = right, left ^ (_mixed(right + key) & ((1 << left_width) - 1))
            left_width, right_width = right_width, left_width
        return left << right_width | right


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of the number."""
    # Shifts of signed numbers bring copies of the sign in from above: the masks take them off.
    numbers = (numbers ^ (numbers >> 30 & ((1 << 34) - 1))) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> 27 & ((1 << 37) - 1))) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> 31 & ((1 << 33) - 1))


@final
class IndexFreeSampler(Sampler[int]):
    """Each sample of ``data_source`` once, in an order decided by the seed and the epoch, without a list of it.

    Takes the same few kilobytes for any number of samples, and begins at any place of the epoch at once.
    ``data_seed`` is the seed; without one it is the seed that torch was given.
    """

    #: Whether the ranks have taken over rank 0's seed: from then on they need no message to begin an epoch.
    seed_is_agreed = False

    def __init__(self, data_source: Sized, data_seed: int | None = None) -> None:
        super().__init__()
        self.data_source = data_source
        self.epoch = 0
        self.initial_seed: int = data_seed if data_seed is not None else torch.random.initial_seed()

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        order, epoch = self.order(), self.epoch
        for start in range(0, len(self), _CHUNK):
            yield from cast("list[int]", order.at(start, start + _CHUNK).tolist())
        self.set_epoch(epoch + 1)

    def order(self) -> Permutation:
        """The order of the epoch."""
        return Permutation(len(self.data_source), self.initial_seed * 1_000_003 + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``."""
        self.epoch = epoch
