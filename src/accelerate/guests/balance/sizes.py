"""The sizes of the ranks' micro-batches, from the time that each rank takes per row."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

#: Sizes change only if the slowest rank is expected to save this part of its time, so that noise doesn't change them.
LEAST_GAIN: Final = 0.1


def choose_sizes(current: Sequence[int], seconds_per_row: Sequence[float]) -> tuple[int, ...]:
    """Return the sizes with which the slowest rank takes the least time; ``current`` if they are about as fast.

    Every rank has at least one row. The result depends on the arguments only.
    """
    found = _fastest(sum(current), seconds_per_row)
    gain = 1 - _longest(found, seconds_per_row) / _longest(current, seconds_per_row)
    return found if gain >= LEAST_GAIN else tuple(current)


def _fastest(num_rows: int, seconds_per_row: Sequence[float]) -> tuple[int, ...]:
    """Give each row to the rank that has computed it first; of equally fast ranks, to the first one."""
    sizes = [1] * len(seconds_per_row)
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(seconds_per_row)]
    heapq.heapify(ends)
    for _ in range(num_rows - len(sizes)):
        _, rank = ends[0]
        sizes[rank] += 1
        heapq.heapreplace(ends, ((sizes[rank] + 1) * seconds_per_row[rank], rank))
    return tuple(sizes)


def _longest(sizes: Sequence[int], seconds_per_row: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, seconds_per_row, strict=True))
