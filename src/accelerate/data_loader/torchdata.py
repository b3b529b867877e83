"""Positions as torchdata's StatefulDataLoader writes and reads them, and prepared loaders that are instances of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, RandomSampler

from accelerate.optional import require
from accelerate.seeding import host_streams
from accelerate.torch_private.data import has_running_iterator

from .order import Drawn, Place

_FRESH: Final = {
    "_index_sampler_state": None,
    "_sampler_iter_state": None,
    "_sampler_iter_yielded": 0,
    "_num_yielded": 0,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
    "fetcher_state": None,
    "dataset_state": None,
}


@cache
def loader_class() -> type[DataLoader[Any]]:
    """Torchdata's StatefulDataLoader.

    Raises:
        MissingDependency: torchdata 0.8 or newer isn't installed.
    """
    purpose = "use_stateful_dataloader=True"
    require("torchdata", purpose=purpose, at_least="0.8.0")
    module = require("torchdata.stateful_dataloader", purpose=purpose)
    return cast("type[DataLoader[Any]]", module.StatefulDataLoader)


@cache
def stateful_class(kind: type[Any]) -> type[Any]:
    """``kind``, a class of prepared loaders, as a subclass of torchdata's loader."""
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": _reduce, "_plain": kind}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind, loader_class()), members)


def _reduce(loader: Any) -> tuple[Any, ...]:
    return _blank, (loader._plain,), loader.__getstate__()


def _blank(kind: type[Any]) -> Any:
    return object.__new__(stateful_class(kind))


# -- positions ---------------------------------------------------------------------------------------------


def is_torchdatas(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` was written by torchdata's loader, and not by a prepared one."""
    return "epoch" not in state and ("_snapshot" in state or "_num_yielded" in state)


def _main_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``state`` about the process that draws."""
    snapshot = state.get("_snapshot")
    return state if snapshot is None else snapshot["_main_snapshot"]


def num_batches_in(state: Mapping[str, Any]) -> int:
    """How many batches the loader had given."""
    snapshot = state.get("_snapshot")
    if snapshot is None:
        return int(state["_num_yielded"])
    return int(snapshot["_snapshot_step"]) + int(state.get("_steps_since_snapshot", 0))


def generator_in(state: Mapping[str, Any]) -> torch.Tensor | None:
    """The state from which torchdata's random sampler drew the order of the epoch."""
    found = _main_of(state).get("_sampler_iter_state") or {}
    found = found.get("sampler_iter_state", found)
    return found.get("generator") if isinstance(found, Mapping) else None


def own_form(state: Mapping[str, Any], place: Place, shares: int, epoch: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """A position of torchdata's in the form that a prepared loader reads."""
    generator = generator_in(state)
    return {
        "epoch": epoch,
        "rounds": place.rounds,
        "groups": place.groups,
        "samples": place.samples,
        "shares": shares,
        "order": {} if generator is None else {"generator": generator},
        "witnesses": [],
        "dataset": None,
        "own": own,
        "_iterator_finished": bool(state.get("_iterator_finished", False)),
    }


def torchdatas_form(
    reader: Any,
    num_workers: int,
    drawn: Drawn | None = None,
    num_batches: int = 0,
    root: Any = None,
    begun: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The position of a loader that is read by index, in torchdata's form.

    Args:
        reader: torchdata's loader, or None before the first pass.
        drawn: the batch in hand, or None between two epochs.
        num_batches: how many batches of the epoch the reader has given.
        root: the sampler that the user's own loader reads by; None where its batches are dealt to several ranks.
        begun: the states that the order of the epoch was drawn from.
    """
    if not has_running_iterator(reader):
        return {} if num_workers else dict(_FRESH)
    state = copy.copy(cast("dict[str, Any]", reader.state_dict()))
    if drawn is None:
        return state
    num_behind = 0
    if state.get("_snapshot") is not None:
        num_behind = int(state.get("_steps_since_snapshot", 0))
        snapshot = state["_snapshot"] = dict(state["_snapshot"])
        snapshot["_snapshot_step"] = num_batches - num_behind
        main = snapshot["_main_snapshot"] = dict(snapshot["_main_snapshot"])
    else:
        main = state
        main["_num_yielded"] = num_batches
    # The reader itself counts from where its pass was continued.
    main["_sampler_iter_yielded"] = num_batches - num_behind
    if root is not None:
        size = getattr(root, "batch_size", None) or 1
        main["_sampler_iter_state"] = _sampler_state(root, drawn.samples - num_behind * size, begun or {}, reader)
    return state


def _sampler_state(root: Any, num_samples: int, begun: Mapping[str, Any], reader: Any) -> dict[str, Any] | None:
    is_batched = getattr(root, "batch_size", None) is not None
    sampler = getattr(root, "sampler", None) if is_batched else root
    state: dict[str, Any] = {}
    generator = _generator_at_start(sampler, begun)
    if generator is not None and _is_torchdatas_to_be(sampler, reader):
        state = {"yielded": num_samples, "generator": generator}
    if not is_batched:
        return state or None
    return {"samples_yielded": num_samples, **({"sampler_iter_state": state} if state else {})}


def _is_torchdatas_to_be(sampler: Any, reader: Any) -> bool:
    """Whether torchdata's loader has a random sampler of its own here: where ``shuffle=True`` asks for one."""
    if type(sampler) is RandomSampler:
        return sampler.generator is None or sampler.generator is reader.generator
    return type(sampler).__module__ == "torchdata.stateful_dataloader.sampler"


def _generator_at_start(sampler: Any, begun: Mapping[str, Any]) -> torch.Tensor | None:
    """The state that a random sampler's generator had when the epoch began."""
    if begun.get("generator") is not None:
        return begun["generator"]
    torch_stream = (begun.get("streams") or {}).get("torch")
    if type(sampler) is not RandomSampler or torch_stream is None:
        return None
    with host_streams({"torch": torch_stream}):  # torch's sampler draws the seed of a generator of its own
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed).get_state()
