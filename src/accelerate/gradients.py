"""The accumulation clock: which backward synchronises, which step is real, which loader is running.

Each Accelerator owns one clock; a loop with two Accelerators, or with two models that accumulate
differently, keeps one count per model. Loaders tell the clock when they start and end, so that the last
batch of a loader always synchronises.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Protocol, final

from .errors import SettingError


@final
@dataclass(slots=True)
class _Window:
    """The micro-batches between two updates of one set of models."""

    count: int = 0  # micro-batches begun since the last loader ended
    is_complete: bool = True  # the micro-batch in hand is the last one
    has_gradients: bool = False  # a backward has run since the window began


class RunningLoader(Protocol):
    """What the clock reads from a prepared loader while its loop runs."""

    end_of_dataloader: bool
    remainder: int


class GradientState:
    """The accumulation clock of one Accelerator.

    ``GradientState()`` without arguments is the newest clock (a new one when there is none), which is what
    libraries that look for "the" gradient state expect. :meth:`create` always makes a new one.
    """

    _newest: ClassVar[GradientState | None] = None

    sync_gradients: bool
    #: Whether ``zero_grad`` would now lose gradients that the window in hand still needs. A loop may clear at its end,
    #: after the step, or at its top, before the forward; at the top of a window's last micro-batch the gradients of
    #: the earlier ones are still wanted.
    protects_gradients: bool
    plugin_kwargs: dict[str, Any]
    dataloader_references: list[weakref.ReferenceType[Any] | None]
    has_assumed_loader: bool  # and has said so: values between batches of several loaders could be those of any

    def __new__(cls, gradient_accumulation_plugin: Any = None) -> GradientState:
        newest = GradientState._newest
        if newest is None:
            return cls.create(gradient_accumulation_plugin)
        if gradient_accumulation_plugin is not None:
            newest.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return newest

    @classmethod
    def create(cls, gradient_accumulation_plugin: Any = None) -> GradientState:
        """A new clock, from now on the newest."""
        clock = object.__new__(cls)
        clock.sync_gradients = True
        clock.protects_gradients = False
        clock.plugin_kwargs = gradient_accumulation_plugin.to_kwargs() if gradient_accumulation_plugin else {}
        # None stands first, so that the active loader is simply the last entry.
        clock.dataloader_references = [None]
        clock._is_xla_gradients_synced = False
        clock._windows = {}
        clock._window = None
        clock._restored_count = 0
        clock._restored_open = False
        clock._num_backwards = 0
        clock.has_assumed_loader = False
        GradientState._newest = clock
        return clock

    _is_xla_gradients_synced: bool
    _num_backwards: int
    _windows: dict[Hashable, _Window]
    _window: _Window | None  # the one in hand; None where somebody else than `advance` decides what synchronises
    _restored_open: bool  # the gradients of such windows were restored too
    _restored_count: int  # where windows begin that are not known yet: their count before an interruption

    # -- what the plugin asked for ---------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True: a clock is usable as soon as it exists."""
        return True

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer update."""
        return self.plugin_kwargs.get("num_steps", 1)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        if not isinstance(value, Integral) or value < 1:
            raise SettingError(
                f"gradient_accumulation_steps={value!r}: give how many micro-batches make an update, at least 1."
            )
        self.plugin_kwargs["num_steps"] = value

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler counts the micro-batches that don't step."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of the running loader always synchronises."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch (less memory, more communication)."""
        return self.plugin_kwargs.get("sync_each_batch", False)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether the XLA gradients of this window have been reduced already."""
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._is_xla_gradients_synced = value

    # -- the count -------------------------------------------------------------------------------------

    def advance(self, key: Hashable = ()) -> bool:
        """One more micro-batch of ``key`` (the models of the window) has begun; returns whether it synchronises."""
        window = self._windows.get(key)
        if window is None:
            is_open = self._restored_open
            window = self._windows[key] = _Window(self._restored_count, not is_open, has_gradients=is_open)
        self._window = window
        if window.is_complete:  # a new window: what lies in the gradients is the last one's
            window.has_gradients = False
        # This runs in every micro-batch, so the properties below are written out.
        asked, reference = self.plugin_kwargs, self.dataloader_references[-1]
        loader = None if reference is None else reference()
        if loader is not None and loader.end_of_dataloader and asked.get("sync_with_dataloader", True):
            window.count = self._restored_count = 0
            self._restored_open = False
            is_complete = True
        else:
            window.count += 1
            is_complete = window.count % asked.get("num_steps", 1) == 0
        window.is_complete = self.sync_gradients = is_complete
        self.protects_gradients = window.has_gradients
        return is_complete

    def note_backward(self) -> int:
        """A backward runs in the micro-batch in hand; returns among how many micro-batches its loss is one."""
        self._num_backwards += 1
        if self._window is not None:
            self._window.has_gradients = True
        self.protects_gradients = not self.sync_gradients
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def num_backwards(self) -> int:
        """Backwards so far."""
        return self._num_backwards

    @property
    def open_window(self) -> tuple[int, int] | None:
        """How many micro-batches of how many are in gradients that no update has used yet; None: no window is open."""
        steps = self.num_steps
        counts = [window.count for window in self._windows.values() if window.has_gradients and not window.is_complete]
        if self._restored_open and not self._windows:  # loaded, and not gone on yet
            counts = [self._restored_count]
        return (max(count % steps for count in counts), steps) if counts else None

    @property
    def progress(self) -> tuple[int, int]:
        """Backwards so far, and the place in the running loader: two numbers that change while the loop goes on."""
        place = getattr(self.active_dataloader, "progress", None)  # loaders of others have none
        return self._num_backwards, getattr(getattr(place, "drawn", None), "rounds", 0)

    @property
    def step(self) -> int:
        """Micro-batches begun since the last loader ended, over the window that is furthest."""
        return max((window.count for window in self._windows.values()), default=self._restored_count)

    @step.setter
    def step(self, value: int) -> None:
        self._windows.clear()
        self._window = None
        self._restored_count, self._restored_open = value, False
        self.protects_gradients = False

    @property
    def windows(self) -> dict[Hashable, int]:
        """By models, the micro-batches begun since the last loader ended."""
        return {key: window.count for key, window in self._windows.items()}

    def continue_windows(self, windows: Mapping[Hashable, int]) -> None:
        """Go on inside these windows, and in those that begin at :attr:`step`: they have gradients already."""
        self.protects_gradients = True
        self._restored_open = self._restored_count % self.num_steps != 0
        for key, count in windows.items():
            is_open = count % self.num_steps != 0
            self._windows[key] = _Window(count, not is_open, has_gradients=is_open)

    def count_of(self, key: Hashable) -> int:
        """Micro-batches of ``key`` begun since the last loader ended."""
        return self._windows[key].count if key in self._windows else 0

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients
        self.protects_gradients = not sync_gradients
        self._window = None

    # -- the loaders -----------------------------------------------------------------------------------

    def _add_dataloader(self, dataloader: Any, *, is_interleaved: bool = False) -> None:
        active = self.active_dataloader
        if is_interleaved and active is not None:
            active.is_interleaved = dataloader.is_interleaved = True
        self._remove_dataloader(dataloader)
        self.dataloader_references.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references = [
            reference
            for reference in self.dataloader_references
            if reference is None or (reference() is not None and reference() is not dataloader)
        ]

    @property
    def running_dataloaders(self) -> list[Any]:
        """The loaders whose loops are running, the one that delivered last at the end."""
        found = (reference() for reference in self.dataloader_references if reference is not None)
        return [loader for loader in found if loader is not None]

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader whose loop is running; None outside of loops."""
        reference = self.dataloader_references[-1]
        return None if reference is None else reference()

    @property
    def in_dataloader(self) -> bool:
        """Whether the loop of a prepared loader is running."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the last one of the active loader."""
        loader: RunningLoader | None = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last, incomplete global batch of the active loader; -1 when unknown or outside."""
        loader: RunningLoader | None = self.active_dataloader
        return -1 if loader is None else loader.remainder

    # -- the old view ----------------------------------------------------------------------------------

    @staticmethod
    def _reset_state() -> None:
        """There is no newest clock any more; Accelerators keep theirs."""
        GradientState._newest = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A clock belongs to the loop that it counts; what is unpickled follows the newest one.
        return (GradientState, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientState:
        """The same clock: a copied optimizer belongs to the same loop."""
        return self

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )
