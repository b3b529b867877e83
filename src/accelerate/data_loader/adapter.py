"""A torch DataLoader that reads through another one, and reports to the gradient state."""

from __future__ import annotations

import copy
import warnings
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ..distributed.random import host_streams
from ..nested import send_to_device
from ..optional import require
from ..torch_private.modules import has_running_iterator
from ..training.accumulation import GradientState
from .iterable import loader_like
from .sampling import BatchCoverage, BatchInfo, OrderState

if TYPE_CHECKING:
    from typing_extensions import Self

    from .loader import PreparedLoader
    from .resume import PositionState

Kind = TypeVar("Kind")

# The attributes that torch lets a user change after a loader's construction.
SETTABLE = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "pin_memory_device",
    "in_order",
)

# The attributes that torch fixes at construction.
_FIXED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")


class FixedAttributeWarning(UserWarning):
    """A loader's attribute that is fixed at construction was assigned to."""


class DataLoaderStateMixin:
    """The state of a loader during its loop: whether the current batch is the last, and its valid rows."""

    end_of_dataloader: bool = False
    remainder: int = -1
    coverage: BatchCoverage | None = None
    current_batch: Any = None
    is_interleaved: bool = False  # another loader's loop alternates with this one
    _drop_last: bool = False
    _gradient_state: GradientState | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The gradient state that this loader reports to; the newest one if none was given."""
        if self._gradient_state is None:
            self._gradient_state = GradientState()
        return self._gradient_state

    @gradient_state.setter
    def gradient_state(self, value: GradientState | None) -> None:
        self._gradient_state = value

    def reset(self) -> None:
        """Forget the current batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.coverage = self.current_batch = None
        self.is_interleaved = False

    def begin(self) -> None:
        """Report the beginning of a loop over this loader."""
        self.reset()
        self.remainder = self._known_remainder()
        self.gradient_state.loaders.add(self)

    def end(self) -> None:
        """Report the end of the loop over this loader, also after a `break`."""
        self.coverage = self.current_batch = None
        self.gradient_state.loaders.remove(self)

    def _known_remainder(self) -> int:
        return -1


@cache
def _silent(kind: type[DataLoader[object]]) -> type[DataLoader[object]]:
    """Return a subclass of the loader class that doesn't repeat torch's warnings in every pass.

    ``warnings.catch_warnings`` instead would make Python forget, in every pass, which warnings it has shown.
    """
    no_check: Any = lambda self: None  # noqa: E731
    return cast("type[DataLoader[object]]", type(kind.__name__, (kind,), {"check_worker_number_rationality": no_check}))


_TorchLoader: type[DataLoader[object]] = _silent(DataLoader)


class DataLoaderAdapter(DataLoader[Any], ABC):
    """A loader with the attributes of the user's loader, which reads through :attr:`base_dataloader`.

    With ``use_stateful_dataloader``, both are instances of torchdata's StatefulDataLoader.

    Raises:
        MissingDependency: ``use_stateful_dataloader`` without torchdata 0.8 or newer.
    """

    def __new__(cls, dataset: object = None, *args: object, **kwargs: object) -> Self:
        """Make an instance; with ``use_stateful_dataloader``, it is one of torchdata's loader too."""
        if kwargs.get("use_stateful_dataloader"):
            return object.__new__(stateful_class(cls))
        return object.__new__(cls)

    def __init__(
        self,
        dataset: Dataset[object],
        use_stateful_dataloader: bool = False,
        batch_sampler: Iterable[list[object]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        # Arguments of torchdata's loader that torch's doesn't have.
        self._stateful_arguments = {name: kwargs.pop(name) for name in ("snapshot_every_n_steps",) if name in kwargs}
        self._base: DataLoader[object] | None = None
        self.own_loader: DataLoader[object] | None = None  # the user's loader, if its class has its own `__iter__`
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; for those fixed at construction, warn instead of raising torch's error."""
        try:
            super().__setattr__(name, value)
        except ValueError:
            if name not in _FIXED:
                raise
            warnings.warn(
                f"{name} = ... on a prepared loader has no effect: it reads what it was prepared for. Change the "
                "loader and prepare it again; skip_first_batches and loader.set_sampler take effect at once.",
                FixedAttributeWarning,
                stacklevel=2,
            )

    def check_worker_number_rationality(self) -> None:
        """Do nothing, because torch warned when the user made the loader."""

    @property
    def base_dataloader(self) -> DataLoader[object]:
        """The loader that reads the data; this loader itself before the first pass."""
        return self if self._base is None else self._base

    def show(self, **attributes: object) -> None:
        """Set public attributes, also those that torch fixes at construction."""
        vars(self).update(attributes)

    def torch_loader(
        self, dataset: Dataset[object], collate: Callable[..., object], **sampling: object
    ) -> DataLoader[object]:
        """Return a torch loader over ``dataset`` with this loader's settings; persistent workers reuse the last one."""
        kept = self._base
        if kept is not None and self._keeps_torch_loader:
            for name in SETTABLE:
                value = getattr(self, name, None)
                if getattr(kept, name, None) is not value:
                    setattr(kept, name, value)
            kept.collate_fn = collate
            return kept
        settings = {name: getattr(self, name) for name in SETTABLE if name in self.__dict__}
        settings.update(multiprocessing_context=self.multiprocessing_context, collate_fn=collate)
        if self.own_loader is not None:
            self._base = loader_like(self.own_loader, dataset, {**settings, **sampling})
            return self._base
        settings.update(sampling, persistent_workers=self.persistent_workers, **self._stateful_arguments)
        if not settings.get("pin_memory_device"):
            settings.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
        self._base = self._torch_class()(dataset, **settings)
        return self._base

    def state_dict(self) -> dict[str, Any]:
        """Return the position of torchdata's loader; empty for torch's loader, which has none."""
        get_state = getattr(self._base, "state_dict", None)
        return {} if get_state is None else get_state()

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load ``state_dict`` into torchdata's loader."""
        take = getattr(self._base, "load_state_dict", None)
        if take is not None:
            take(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing, because the state is already that of the current batch, without batches read ahead."""

    @property
    def _keeps_torch_loader(self) -> bool:
        return self.persistent_workers or self.use_stateful_dataloader

    def _torch_class(self) -> type[DataLoader[object]]:
        if not self.use_stateful_dataloader:
            return _TorchLoader
        return _silent(loader_class())

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without those of this process: the reader, its workers and the gradient state."""
        return {**self.__dict__, "_base": None, "_gradient_state": None}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)


# --------------------------------------------------------------------------------------------------
# torchdata's StatefulDataLoader: prepared loaders that are instances of it, and its format of positions

_SAMPLER: Final = "_index_sampler_state"
_FRESH: Final = {
    _SAMPLER: None,
    "_sampler_iter_state": None,
    "_sampler_iter_yielded": 0,
    "_num_yielded": 0,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
    "fetcher_state": None,
    "dataset_state": None,
    "_iterator_finished": False,
}


@cache
def loader_class() -> type[DataLoader[object]]:
    """Return torchdata's StatefulDataLoader.

    Raises:
        MissingDependency: torchdata 0.8 or newer isn't installed.
    """
    purpose = "use_stateful_dataloader=True"
    require("torchdata", purpose=purpose, at_least="0.8.0")
    module = require("torchdata.stateful_dataloader", purpose=purpose)
    return cast("type[DataLoader[object]]", module.StatefulDataLoader)


def stateful_class(kind: type[Kind]) -> type[Kind]:
    """Return ``kind``, a class of prepared loaders, as a subclass of torchdata's loader."""
    return cast("type[Kind]", _stateful_class(kind))


@cache
def _stateful_class(kind: type[object]) -> type[object]:
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": _reduce, "_plain": kind}
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind, loader_class()), members)


def _reduce(loader: Any) -> tuple[object, ...]:
    return _blank, (loader._plain,), loader.__getstate__()


def _blank(kind: type[object]) -> object:
    return object.__new__(stateful_class(kind))


# -- positions ---------------------------------------------------------------------------------------------


def is_torchdatas(state: Mapping[str, object]) -> bool:
    """Return whether torchdata's loader, not a prepared loader, wrote ``state``."""
    return "epoch" not in state and ("_snapshot" in state or "_num_yielded" in state)


def _main_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``state`` about the main process, which draws the samples."""
    snapshot = state.get("_snapshot")
    return state if snapshot is None else snapshot["_main_snapshot"]


def torchdatas_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return torchdata's part of ``state``, without a prepared loader's position."""
    return {
        key: value for key, value in state.items() if key in _FRESH or key in ("_snapshot", "_steps_since_snapshot")
    }


def with_position(state: Mapping[str, Any], position: PositionState) -> dict[str, Any]:
    """Return ``state`` with ``position`` as the state of its index sampler, for orders that torchdata can't save."""
    own = {key: value for key, value in position["own"].items() if key != "loader"}
    sampler_state = {_SAMPLER: {**position, "own": own}}
    if state.get("_snapshot") is None:
        return {**state, **sampler_state}
    snapshot = state["_snapshot"]
    return {**state, "_snapshot": {**snapshot, "_main_snapshot": {**snapshot["_main_snapshot"], **sampler_state}}}


def position_in(state: Mapping[str, Any]) -> PositionState | None:
    """Return the position that :func:`with_position` put into ``state``."""
    found = _main_of(state).get(_SAMPLER)
    return cast("PositionState", found) if isinstance(found, Mapping) and "rounds" in found else None


def num_batches_in(state: Mapping[str, Any]) -> int:
    """Return the number of batches that the loader had yielded."""
    snapshot = state.get("_snapshot")
    if snapshot is None:
        return int(state["_num_yielded"])
    return int(snapshot["_snapshot_step"]) + int(state.get("_steps_since_snapshot", 0))


def generator_in(state: Mapping[str, object]) -> torch.Tensor | None:
    """Return the state from which torchdata's random sampler drew the order of the epoch."""
    found = _main_of(state).get("_sampler_iter_state") or {}
    found = found.get("sampler_iter_state", found)
    return found.get("generator") if isinstance(found, Mapping) else None


def torchdatas_form(
    reader: DataLoader[object] | None,
    num_workers: int,
    batch_info: BatchInfo | None = None,
    num_batches: int = 0,
    root: Iterable[object] | None = None,
    order_state: OrderState | None = None,
) -> dict[str, object]:
    """Return the position of a loader over a map-style dataset, in torchdata's format.

    Args:
        reader: torchdata's loader, or None before the first pass.
        batch_info: of the current batch, or None between two epochs.
        num_batches: how many batches of the epoch the reader has yielded.
        root: the sampler of the user's loader; None if its batches are sharded over several ranks.
        order_state: the states that the order of the epoch was drawn from.
    """
    if reader is None or not has_running_iterator(reader):
        return {} if num_workers else dict(_FRESH)
    state = copy.copy(cast("dict[str, Any]", cast("Any", reader).state_dict()))
    if batch_info is None:
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
    # The reader itself counts from the position at which its pass resumed.
    main["_sampler_iter_yielded"] = num_batches - num_behind
    if root is not None:
        size = getattr(root, "batch_size", None) or 1
        main["_sampler_iter_state"] = _sampler_state(
            root, batch_info.samples - num_behind * size, order_state or {}, reader
        )
    return state


def _sampler_state(
    root: object, num_samples: int, order_state: OrderState, reader: DataLoader[object]
) -> dict[str, object] | None:
    is_batched = getattr(root, "batch_size", None) is not None
    sampler = getattr(root, "sampler", None) if is_batched else root
    state: dict[str, object] = {}
    generator = _generator_at_start(sampler, order_state)
    if generator is not None and _is_torchdatas_to_be(sampler, reader):
        state = {"yielded": num_samples, "generator": generator}
    if not is_batched:
        return state or None
    return {"samples_yielded": num_samples, **({"sampler_iter_state": state} if state else {})}


def _is_torchdatas_to_be(sampler: object, reader: DataLoader[object]) -> bool:
    """Return whether torchdata's loader replaces this sampler by its own random sampler (for ``shuffle=True``)."""
    if type(sampler) is RandomSampler:
        return sampler.generator is None or sampler.generator is reader.generator
    return type(sampler).__module__ == "torchdata.stateful_dataloader.sampler"


def _generator_at_start(sampler: object, order_state: OrderState) -> torch.Tensor | None:
    """Return the state that a random sampler's generator had when the epoch began."""
    generator = order_state.get("generator")
    if generator is not None:
        return generator
    torch_stream = (order_state.get("streams") or {}).get("torch")
    if type(sampler) is not RandomSampler or torch_stream is None:
        return None
    with host_streams({"torch": torch_stream}):  # torch's sampler draws the seed of its own generator
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return torch.Generator().manual_seed(seed).get_state()


# --------------------------------------------------------------------------------------------------
# Sequence parallelism: each rank's batch in turn, sharded into one part per rank


@final
class SequenceShardLoader(DataLoaderStateMixin):
    """A wrapper of a prepared loader that yields parts of sequences, ``num_parts`` per batch.

    All ranks of a process group compute together, one after the other, the batches that they read in one step. All
    other attributes are those of the prepared loader.

    Args:
        loader: the prepared loader; each rank reads its own batches.
        cut: returns an iterable over the parts of a loader's batches, ``num_parts`` per batch.
        num_parts: the number of ranks that compute one sequence together.
        skip_parts: the number of parts to skip at the beginning of each pass.
    """

    def __init__(
        self, loader: Any, cut: Callable[[Any], Iterable[object]], num_parts: int, skip_parts: int = 0
    ) -> None:
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
                self.end_of_dataloader: bool = number % num_parts == 0 and getattr(
                    self.loader, "end_of_dataloader", False
                )
                if self.gradient_state.loaders.active is not self:  # the loader has read
                    self.gradient_state.loaders.add(self)
                yield part if device is None else send_to_device(part, device)
        finally:
            self.end()

    def over(self, loader: PreparedLoader, skip_parts: int = 0) -> SequenceShardLoader:
        """Return a loader over the parts of ``loader``'s batches, from part ``skip_parts`` on."""
        return SequenceShardLoader(loader, self._cut, self.num_parts, skip_parts)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)
