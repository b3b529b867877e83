"""The epochs of samplers and datasets with ``set_epoch``, set by loaders or by the script."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from .sampling import IndexFreeSampler, SeedableRandomSampler, samplers_of
from .sharding import IterableDatasetShard

# By id, because a dataset may be a dataclass without a hash: the object, and its last known epoch.
_known: dict[int, tuple[weakref.ref[Any], object]] = {}


def epoch_listeners(root: object, dataset: object) -> list[Any]:
    """Return the samplers in ``root`` that have ``set_epoch``; without any, ``dataset`` if it has it."""
    listeners = [sampler for sampler in samplers_of(root) if getattr(sampler, "set_epoch", None) is not None]
    return listeners or [one for one in (dataset,) if getattr(one, "set_epoch", None) is not None]


def note_epochs(listeners: Iterable[object], *, only_new: bool = False) -> None:
    """Remember the current epochs of ``listeners``; with ``only_new``, of listeners not yet known."""
    for listener in map(_own, listeners):
        key = id(listener)
        if listener is None or (only_new and key in _known):
            continue
        try:
            _known[key] = weakref.ref(listener, lambda _, key=key: _known.pop(key, None)), _epoch_of(listener)
        except TypeError:  # a class with slots
            continue


def epoch_of_script(listeners: Iterable[object]) -> int | None:
    """Return the epoch that the script has set on one of ``listeners`` since :func:`note_epochs`, or None."""
    for listener in map(_own, listeners):
        known = _known.get(id(listener))
        epoch = _epoch_of(listener)
        if known is not None and isinstance(epoch, int) and epoch != known[1]:
            return epoch
    return None


def _own(listener: object) -> object | None:
    """Return the script's object; None for this package's samplers, which count epochs themselves."""
    if isinstance(listener, (SeedableRandomSampler, IndexFreeSampler)):
        return None
    return listener.dataset if isinstance(listener, IterableDatasetShard) else listener


def _epoch_of(listener: object) -> object:
    return getattr(listener, "epoch", None)
