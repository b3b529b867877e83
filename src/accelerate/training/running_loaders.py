"""The loaders whose loops are running."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, final


class RunningLoader(Protocol):
    """The attributes of a prepared loader that are read during the loader's loop."""

    end_of_dataloader: bool
    remainder: int
    is_interleaved: bool


@final
class RunningLoaders:
    """The loaders with running loops in one training loop; the one that yielded last is at the end."""

    def __init__(self) -> None:
        self.references: list[weakref.ReferenceType[Any]] = []
        self.nested_seconds: float = 0.0  # time of passes inside another loader's pass, such as evaluations
        self.has_assumed_loader: bool = False  # whether AssumedLoaderWarning was given

    def add(self, loader: RunningLoader, *, is_interleaved: bool = False) -> None:
        """Make ``loader`` the active one; ``is_interleaved`` if its loop and the active one's alternate."""
        active = self.active
        if is_interleaved and active is not None:
            active.is_interleaved = loader.is_interleaved = True
        self.remove(loader)
        self.references.append(weakref.ref(loader))

    def remove(self, loader: object) -> None:
        """Remove ``loader``, whose loop has ended."""
        self.references = [one for one in self.references if (held := one()) is not None and held is not loader]

    def all(self) -> list[RunningLoader]:
        """Return the loaders; the one that yielded last is at the end."""
        return [loader for loader in (reference() for reference in self.references) if loader is not None]

    @property
    def active(self) -> RunningLoader | None:
        """The loader that yielded last; None outside of loops."""
        return self.references[-1]() if self.references else None
