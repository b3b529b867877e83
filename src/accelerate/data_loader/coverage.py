"""Which rows of a batch are real samples, and which were added so that all ranks have equal batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import final


@final
@dataclass(frozen=True)
class BatchCoverage:
    """For every share of the data, in order: how many leading rows of its batch are real, and how many rows it has.

    Every rank holds the account of all shares, so that what was gathered can be cut without asking anybody.
    """

    real: tuple[int, ...]
    size: tuple[int, ...]
    num_absent: int = 0  # shares, the last ones, that have no batch at all in this round

    @property
    def is_uneven(self) -> bool:
        """Whether shares have batches of different sizes, or none."""
        return self.num_absent > 0 or min(self.size) != max(self.size)

    def of_present(self) -> BatchCoverage:
        """The account of the shares that have a batch."""
        present = len(self.size) - self.num_absent
        return BatchCoverage(self.real[:present], self.size[:present]) if self.num_absent else self

    @property
    def is_complete(self) -> bool:
        """Whether every row is a real sample."""
        return self.real == self.size

    @property
    def num_samples(self) -> int:
        """Real samples in the batches of all shares together."""
        return sum(self.real)


@lru_cache(maxsize=256)
def full_coverage(size: int, count: int) -> BatchCoverage:
    """The account of ``count`` batches of ``size`` real samples each."""
    sizes = (size,) * count
    return BatchCoverage(sizes, sizes)


def rows_to_keep(rows: Sequence[int], coverage: BatchCoverage | None) -> list[slice] | None:
    """Where the real rows lie among those gathered from all shares, ``rows`` of each; None: all rows stay.

    A sample may have several rows (all samples equally many), a share may have been padded to the largest one, or may
    give one row altogether: then that of a share without a real sample is left out. Rows that can't belong to the
    samples of the batch all stay.
    """
    if coverage is None or len(rows) != len(coverage.size):
        return None
    real, size, largest = coverage.real, coverage.size, max(coverage.size)
    if coverage.is_complete and min(size) == largest:
        return None
    rows_per_sample = next((number // of_share for number, of_share in zip(rows, size, strict=True) if of_share), 0)
    if not rows_per_sample or any(
        number != of_share * rows_per_sample for number, of_share in zip(rows, size, strict=True)
    ):
        if len(set(rows)) > 1:
            return None
        if rows[0] == 1:
            real, rows_per_sample = tuple(min(number, 1) for number in real), 1
        elif largest and rows[0] % largest == 0:
            rows_per_sample = rows[0] // largest
        else:
            return None
    starts = [0, *accumulate(rows)]
    return [slice(start, start + number * rows_per_sample) for start, number in zip(starts, real, strict=False)]
