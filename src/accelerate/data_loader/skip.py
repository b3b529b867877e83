"""Loaders that leave out the first batches of an epoch."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import SettingError
from .order import SkipBatchSampler
from .prefetch import BatchFeeder
from .sequence_parts import SequencePartsLoader


class SkipDataLoader(BatchFeeder):
    """A torch DataLoader without the first ``skip_batches`` batches of every pass."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._is_accelerate_prepared = False


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader of the same class that begins at batch ``num_batches`` of the epoch.

    It shares the epoch and the position with ``dataloader``. Skipping data that is read by index touches no data.
    Where a checkpoint has been loaded, ``num_batches`` counts from the beginning of the epoch that it was saved in,
    and takes the place of the restored position.
    """
    if not isinstance(num_batches, Integral) or num_batches < 0:
        raise SettingError(f"skip_first_batches(..., {num_batches!r}): give the number of batches to skip, 0 or more.")
    if isinstance(dataloader, SequencePartsLoader):
        groups, rest = divmod(dataloader.skip_parts + num_batches, dataloader.num_parts)
        return dataloader.over(skip_first_batches(dataloader.loader, groups), rest)
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if isinstance(dataloader, BatchFeeder):
        if is_stream:
            return dataloader.copy_with(_skip_batches=dataloader.skip_batches + num_batches)
        skip = SkipBatchSampler(dataloader.index_sampler, num_batches)
        return dataloader.copy_with(**{"sampler" if dataloader.batch_sampler is None else "batch_sampler": skip})
    arguments = arguments_of(dataloader)
    if is_stream:
        return SkipDataLoader(
            dataloader.dataset,
            skip_batches=num_batches,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            **arguments,
        )
    if dataloader.batch_sampler is None:
        skip = SkipBatchSampler(dataloader.sampler, num_batches)
        return DataLoader(dataloader.dataset, sampler=skip, batch_size=None, **arguments)
    return DataLoader(
        dataloader.dataset, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches), **arguments
    )


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def arguments_of(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments that ``dataloader`` was made with, except those that say which samples it reads."""
    arguments = {name: getattr(dataloader, name) for name in _KEPT if getattr(dataloader, name, None) is not None}
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
    return arguments
