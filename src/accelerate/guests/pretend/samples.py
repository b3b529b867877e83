"""The samples that a rank reads: the indices of its first batches, and the number of batches in an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, final

from torch.utils.data import IterableDataset

from ...data_loader.dispatch import DataLoaderDispatcher
from ...data_loader.indexed import IndexReader
from ...data_loader.loader import PreparedLoader
from ...data_loader.sampling import BatchInfo
from .replacing import replaced

_NUM_SHOWN: Final = 3


@final
@dataclass(frozen=True)
class LoaderShare:
    """The part of one loader that this rank reads.

    Attributes:
        positions: the dataset indices of each of the first batches; None if this rank doesn't draw them.
        is_received: rank 0 reads the batches, and this rank receives its part.
        num_batches: the number of this rank's batches in an epoch; None if unknown.
        num_samples: the number of samples in the dataset, over all ranks.
        global_batch: the number of samples of all ranks in one step.
    """

    positions: list[list[object]] | None
    num_batches: int | None
    num_samples: int | None
    global_batch: int | None
    is_received: bool = False


@final
class SampleRecord:
    """The first batches of each prepared loader."""

    def __init__(self) -> None:
        self._drawn: dict[int, list[object]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Enter a context in which the indices of each loader's first batches are recorded."""
        draw = IndexReader.draw

        def recorded(reader: IndexReader) -> Iterator[BatchInfo]:
            kept = self._drawn.setdefault(id(reader.loader), [])
            num_kept = _NUM_SHOWN * _batches_of_step(reader.loader)
            for batch_info in draw(reader):
                if len(kept) < num_kept:
                    kept.append(batch_info.indices)
                yield batch_info

        with replaced(IndexReader, "draw", recorded):
            yield

    def share_of(self, loader: Any) -> LoaderShare:
        """Return this rank's part of the loader's data; a loader that wasn't read yet starts an epoch."""
        loader = getattr(loader, "loader", loader)
        by_index = isinstance(loader, PreparedLoader) and not isinstance(loader.dataset, IterableDataset)
        is_received = isinstance(loader, DataLoaderDispatcher) and loader.dp_rank().index > 0
        if is_received:  # from a process with other random states
            self._drawn.pop(id(loader), None)
        elif by_index and id(loader) not in self._drawn:
            for number, _ in enumerate(IndexReader(loader, loader.plan(None)).draw(), start=1):
                if number == _NUM_SHOWN * _batches_of_step(loader):
                    break
        drawn = self._drawn.get(id(loader))
        positions = None if drawn is None else [_as_list(batch) for batch in drawn]
        if positions is not None and isinstance(loader, DataLoaderDispatcher):
            positions = _first_parts(positions, loader)
        return LoaderShare(
            positions,
            _known(lambda: len(loader)),
            _known(lambda: loader.total_dataset_length),
            _known(lambda: loader.total_batch_size),
            is_received,
        )


def _batches_of_step(loader: PreparedLoader) -> int:
    """Return the number of batches drawn for one step: those of all ranks if rank 0 reads them."""
    return loader.batches_per_step if isinstance(loader, DataLoaderDispatcher) else 1


def _first_parts(drawn: list[list[object]], loader: DataLoaderDispatcher) -> list[list[object]]:
    """Return rank 0's part of each step's batches, which are concatenated and split into equal parts."""
    step = loader.batches_per_step
    joined = [list(chain(*drawn[begin : begin + step])) for begin in range(0, len(drawn), step)]
    return [samples[: math.ceil(len(samples) / loader.dp_rank().count)] for samples in joined]


def _as_list(batch: object) -> list[object]:
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _known(count: Callable[[], int]) -> int | None:
    """Return the length; None if the loader or its dataset has none."""
    try:
        return count()
    except (TypeError, AttributeError, NotImplementedError):
        return None
