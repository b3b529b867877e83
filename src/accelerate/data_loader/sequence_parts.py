"""Loaders for ranks that compute one sequence together: every rank's batch in turn, of which each gets its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, final

from accelerate.nested import send_to_device

from .adapter import DataLoaderStateMixin


@final
class SequencePartsLoader(DataLoaderStateMixin):
    """A prepared loader, ``num_parts`` times as long, whose batches are parts of sequences.

    The batches that the ranks of a group read at the same time are computed one after the other, by all of them
    together. Everything that isn't said here is the prepared loader's.

    Args:
        loader: the prepared loader; each rank reads batches of its own.
        cut: one pass over the parts of what a loader gives: ``num_parts`` of them for each of its batches.
        num_parts: how many ranks compute one sequence.
        skip_parts: how many parts of each pass are left out.
    """

    def __init__(self, loader: Any, cut: Callable[[Any], Iterable[Any]], num_parts: int, skip_parts: int = 0) -> None:
        self.loader = loader
        self.num_parts = num_parts
        self.skip_parts = skip_parts
        self._cut = cut
        self.gradient_state = getattr(loader, "gradient_state", None)

    def __len__(self) -> int:
        return len(self.loader) * self.num_parts - self.skip_parts

    def __iter__(self) -> Iterator[Any]:
        num_parts, device = self.num_parts, getattr(self.loader, "device", None)
        parts = enumerate(self._cut(self.loader), 1)
        self.begin()
        try:
            for number, part in islice(parts, self.skip_parts, None):
                # The loader itself is at its end as soon as its last batch is read.
                self.end_of_dataloader = number % num_parts == 0 and getattr(self.loader, "end_of_dataloader", False)
                if self.gradient_state.active_dataloader is not self:  # the loader has read
                    self.gradient_state._add_dataloader(self)
                yield part if device is None else send_to_device(part, device)
        finally:
            self.end()

    def over(self, loader: Any, skip_parts: int = 0) -> SequencePartsLoader:
        """The parts of what ``loader`` gives, from that part on."""
        return SequencePartsLoader(loader, self._cut, self.num_parts, skip_parts)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)
