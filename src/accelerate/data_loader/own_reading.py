"""Subclasses of torch's DataLoader that read in a way of their own: they go on reading so, from a part of the data."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, Final

from torch.utils.data import DataLoader

from accelerate.errors import PreparationError

_METHODS: Final = ("__iter__", "_get_iterator")


def reads_by_itself(dataloader: Any) -> bool:
    """Whether the class of ``dataloader`` has an ``__iter__``, or an iterator, of its own."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    known = [DataLoader] if torchdata is None else [DataLoader, torchdata.StatefulDataLoader]
    kind = type(dataloader)
    return not any(all(getattr(kind, name, None) is getattr(one, name, None) for name in _METHODS) for one in known)


def reader_like(own: DataLoader[Any], dataset: Any, settings: Mapping[str, Any]) -> DataLoader[Any]:
    """A copy of the user's loader that reads ``dataset`` with the samplers and settings that are given."""
    reader = copy.copy(own)
    changed = {name: value for name, value in settings.items() if name != "multiprocessing_context"}
    # Torch fixes these attributes at construction; a copy is constructed without it.
    vars(reader).update(changed, dataset=dataset, _iterator=None)
    if "batch_size" in settings and settings["batch_size"] is None:
        vars(reader).update(batch_sampler=None)
    return reader


def gave_other_batches(own: Any, problem: str) -> PreparationError:
    """The refusal of a loader whose batches aren't those that its batch sampler asked for."""
    name = type(own).__qualname__
    return PreparationError(
        f"{name}.__iter__ {problem}, so it can't be told which samples its batches hold. A loader whose class has an "
        "__iter__ of its own can be prepared if that gives one batch for each of self.batch_sampler, in this order "
        "(as `for batch in super().__iter__()` does). Move what it does into the dataset, collate_fn or the batch "
        f"sampler, or don't prepare this {name}."
    )


def refuse_unless_kept(own: Any, *, is_sharded_stream: bool, use_stateful_dataloader: bool) -> None:
    """Check that the own reading of ``own`` can be kept.

    Raises:
        PreparationError: it can't, for the reason that is given.
    """
    name = type(own).__qualname__
    if is_sharded_stream:
        raise PreparationError(
            f"{name} has an __iter__ of its own and reads a stream that every rank would have to take a part of, which "
            "is done where batches are collated, behind that __iter__. Use dispatch_batches=True (rank 0 reads), or "
            "already_sharded=True if each rank's stream is its own part."
        )
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    if use_stateful_dataloader and not (torchdata and isinstance(own, torchdata.StatefulDataLoader)):
        raise PreparationError(
            f"use_stateful_dataloader=True reads through torchdata's StatefulDataLoader, but {name} has an __iter__ of "
            f"its own. Derive {name} from StatefulDataLoader, or leave use_stateful_dataloader out (the position is "
            "saved without it)."
        )
