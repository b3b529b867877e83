"""A torch DataLoader whose reading is done by another one, and the part of it that the accumulation clock sees."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from torch.utils.data import DataLoader

from accelerate.gradients import GradientState

from .coverage import BatchCoverage
from .own_reading import reader_like
from .torchdata import loader_class, stateful_class

# What torch lets a user change on a loader after its construction.
_SETTABLE = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "pin_memory_device",
    "in_order",
)

# What torch fixes at construction.
_FIXED = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")


class FixedAttributeWarning(UserWarning):
    """An attribute that a loader has for good was assigned to."""


class DataLoaderStateMixin:
    """What a loader tells while its loop runs: whether the batch in hand is the last, and what it holds."""

    end_of_dataloader: bool = False
    remainder: int = -1
    coverage: BatchCoverage | None = None
    batch_in_hand: Any = None
    is_interleaved: bool = False  # another loop delivers batches in turn with this one
    _drop_last: bool = False
    _gradient_state: GradientState | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The clock that this loader reports to; the newest one where none was given."""
        if self._gradient_state is None:
            self._gradient_state = GradientState()
        return self._gradient_state

    @gradient_state.setter
    def gradient_state(self, value: GradientState | None) -> None:
        self._gradient_state = value

    def reset(self) -> None:
        """Nothing is known about a batch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.coverage = self.batch_in_hand = None
        self.is_interleaved = False

    def begin(self) -> None:
        """The loop of this loader runs."""
        self.reset()
        self.remainder = self._known_remainder()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """The loop of this loader has ended, or was left."""
        self.coverage = self.batch_in_hand = None
        self.gradient_state._remove_dataloader(self)

    def _known_remainder(self) -> int:
        return -1


@cache
def _silent(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """The class of a loader that is made for every pass and doesn't repeat what torch said when the user made theirs.

    ``warnings.catch_warnings`` in its place would make Python forget, at every pass, which warnings it has shown.
    """
    said: Any = lambda self: None  # noqa: E731
    return cast("type[DataLoader[Any]]", type(kind.__name__, (kind,), {"check_worker_number_rationality": said}))


_Reader: type[DataLoader[Any]] = _silent(DataLoader)


class DataLoaderAdapter(DataLoader[Any], ABC):
    """A loader with the attributes of the user's, which reads through :attr:`base_dataloader`.

    With ``use_stateful_dataloader`` that one is torchdata's StatefulDataLoader, and this one an instance of it.

    Raises:
        MissingDependency: ``use_stateful_dataloader`` without torchdata 0.8 or newer.
    """

    def __new__(cls, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """An instance of torchdata's loader too, where that one is asked for by name."""
        if kwargs.get("use_stateful_dataloader"):
            cls = stateful_class(cls)
        return object.__new__(cls)

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        # Arguments of torchdata's loader that torch's doesn't have.
        self._stateful_arguments = {name: kwargs.pop(name) for name in ("snapshot_every_n_steps",) if name in kwargs}
        self._base: DataLoader[Any] | None = None
        self.own_loader: DataLoader[Any] | None = None  # the user's, where its class reads in a way of its own
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a remark in place of torch's error for those that are fixed at construction."""
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
        """Warn of nothing: torch did when the user made the loader."""

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader that reads: this one until the first pass."""
        return self if self._base is None else self._base

    def show(self, **attributes: Any) -> None:
        """The attributes have these values for whoever looks, also those that torch fixes at construction."""
        vars(self).update(attributes)

    def reader(self, dataset: Any, collate: Any, **sampling: Any) -> DataLoader[Any]:
        """A torch loader that reads ``dataset`` with the settings of this one; kept where its workers are."""
        kept = self._base
        if kept is not None and self._keeps_reader:
            for name in _SETTABLE:
                value = getattr(self, name, None)
                if getattr(kept, name, None) is not value:
                    setattr(kept, name, value)
            kept.collate_fn = collate
            return kept
        settings = {name: getattr(self, name) for name in _SETTABLE if name in self.__dict__}
        settings.update(multiprocessing_context=self.multiprocessing_context, collate_fn=collate)
        if self.own_loader is not None:
            self._base = reader_like(self.own_loader, dataset, {**settings, **sampling})
            return self._base
        settings.update(sampling, persistent_workers=self.persistent_workers, **self._stateful_arguments)
        if not settings.get("pin_memory_device"):
            settings.pop("pin_memory_device", None)  # deprecated: naming it at all makes torch warn
        self._base = self._reader_class()(dataset, **settings)
        return self._base

    def state_dict(self) -> dict[str, Any]:
        """Where torchdata's loader stands; empty where torch's own reads, which doesn't know."""
        tell = getattr(self._base, "state_dict", None)
        return {} if tell is None else tell()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Torchdata's loader goes on from there."""
        take = getattr(self._base, "load_state_dict", None)
        if take is not None:
            take(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """The state is that of the batch in hand: it is so already, however many batches were read ahead."""

    @property
    def _keeps_reader(self) -> bool:
        return self.persistent_workers or self.use_stateful_dataloader

    def _reader_class(self) -> type[DataLoader[Any]]:
        if not self.use_stateful_dataloader:
            return _Reader
        return _silent(loader_class())

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what lives in this process only: the reader and its workers, the clock."""
        return {**self.__dict__, "_base": None, "_gradient_state": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
