"""What is recorded of a simulated rank: the memory of its steps, and the samples that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch.utils.data import IterableDataset

from ...data_loader.dispatch import DataLoaderDispatcher
from ...data_loader.loader import PreparedLoader
from ...data_loader.map_style import IndexReader
from ...data_loader.sampling import BatchInfo
from ...devices.allocations import AllocationTracker
from ...torch_private.tracing import Operator, inner_tensors, local_part, tree_leaves


@final
class MemoryRecord:
    """The live bytes of tensors without values, and their peak."""

    def __init__(self) -> None:
        self.tracker: AllocationTracker = AllocationTracker(torch.device("cpu"))
        self.tracker.on_growth = self._note_peak
        #: The peak of each kind since the last `prepare`, independently of the others.
        self.peak_activations: int = 0
        self.peak_gathered: int = 0
        self.peak_total: int = 0
        #: The peak of all kinds together until then.
        self.peak_of_preparation: int = 0

    def prepared(self) -> None:
        """Start to record the steps; memory allocated before the end of `prepare` is counted separately."""
        self.peak_of_preparation = max(self.peak_of_preparation, self.peak_total)
        self.peak_activations = self.peak_gathered = self.peak_total = 0

    def made(self, func: Operator, args: object, kwargs: dict[str, object], result: object) -> None:
        """Count the result of an operation; FSDP's own operations gather weights and copy gradients."""
        if func.namespace == "fsdp":
            self.tracker.count(tree_leaves([args, kwargs.get("out"), result]), "gathered")
            self._note_peak()
        elif self.tracker.count(tree_leaves(result)):
            self._note_peak()

    def _note_peak(self) -> None:
        found = self.tracker.num_bytes
        self.peak_activations = max(self.peak_activations, found["other"])
        self.peak_gathered = max(self.peak_gathered, found["gathered"])
        self.peak_total = max(self.peak_total, sum(found.values()))

    def count_model(self, model: torch.nn.Module) -> None:
        """Count the model's own tensors as weights and buffers."""
        self.tracker.count(map(local_part, model.parameters()), "weights")
        self.tracker.count(map(local_part, model.buffers()), "buffers")

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's state and the gradients that it used."""
        state = map(local_part, tree_leaves(list(optimizer.state.values())))
        self.tracker.count((part for value in state for part in inner_tensors(value)), "optimizer")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = (local_part(each.grad) for each in parameters if each.grad is not None)
        self.tracker.count(gradients, "gradients")

    @contextmanager
    def following_storages(self) -> Iterator[None]:
        """Enter a context in which a storage is counted again when it is resized, as FSDP does."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> object:
            result = resize(storage, num_bytes)
            self.tracker.resized(storage)
            self._note_peak()
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield


def num_bytes_of(tensors: Iterable[object]) -> int:
    """Return the bytes of this rank's parts of the tensors; each tensor counts once."""
    parts = {id(part): part for part in map(local_part, tensors) if isinstance(part, torch.Tensor)}
    return sum(part.numel() * part.element_size() for part in parts.values())


# --------------------------------------------------------------------------------------------------
# The samples that a rank reads

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

        with patch.object(IndexReader, "draw", recorded):
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
