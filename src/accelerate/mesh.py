"""Degrees of parallelism and a world, as slices of the data and as a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class DataShare:
    """Which slice of the data a process reads: ranks that differ only in model-parallel axes share an index."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(f"A data share needs 0 <= index < count, got index {self.index} of {self.count}.")
