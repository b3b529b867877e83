"""The samples that a rank reads: the positions of its first batches, and how many there are in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from torch.utils.data import IterableDataset

from ...data_loader.indexed import IndexReader
from ...data_loader.prefetch import PreparedLoader
from ...data_loader.sampling import BatchInfo
from .replacing import replaced

_NUM_SHOWN: Final = 3


@final
@dataclass(frozen=True)
class LoaderShare:
    """The part of one loader that this rank reads.

    Attributes:
        positions: the indices in the dataset of each of the first batches; None where they aren't drawn by index.
        num_batches: of this rank in an epoch; None where nobody knows.
        num_samples: in the dataset, over all ranks.
        global_batch: samples that all ranks take in one step.
    """

    positions: list[list[object]] | None
    num_batches: int | None
    num_samples: int | None
    global_batch: int | None


@final
class SampleRecord:
    """The first batches that each prepared loader has drawn."""

    def __init__(self) -> None:
        self._drawn: dict[int, list[object]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter a context in which the positions of each loader's first batches are kept."""
        draw = IndexReader.draw

        def recorded(reader: IndexReader) -> Iterator[BatchInfo]:
            kept = self._drawn.setdefault(id(reader.loader), [])
            for batch_info in draw(reader):
                if len(kept) < _NUM_SHOWN:
                    kept.append(batch_info.indices)
                yield batch_info

        with replaced(IndexReader, "draw", recorded):
            yield

    def share_of(self, loader: Any) -> LoaderShare:
        """Return what this rank reads of the loader; one that nobody has read yet begins an epoch for that."""
        loader = getattr(loader, "loader", loader)
        by_index = isinstance(loader, PreparedLoader) and not isinstance(loader.dataset, IterableDataset)
        if by_index and id(loader) not in self._drawn:
            for number, _ in enumerate(IndexReader(loader, None).draw(), start=1):
                if number == _NUM_SHOWN:
                    break
        positions = self._drawn.get(id(loader))
        return LoaderShare(
            None if positions is None else [_as_list(batch) for batch in positions],
            _known(lambda: len(loader)),
            _known(lambda: loader.total_dataset_length),
            _known(lambda: loader.total_batch_size),
        )


def _as_list(batch: object) -> list[object]:
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _known(count: Callable[[], int]) -> int | None:
    """Return the count; None where the loader or its dataset has none."""
    try:
        return count()
    except (TypeError, AttributeError, NotImplementedError):
        return None
