"""The accumulation clock: which backward synchronises, which step is real, which loader is running.

Each Accelerator owns one clock; a loop with two Accelerators, or with two models that accumulate
differently, keeps one count per model. Loaders tell the clock when they start and end, so that the last
batch of a loader always synchronises.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, ClassVar, Protocol

from .errors import SettingError


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
    plugin_kwargs: dict[str, Any]
    dataloader_references: list[weakref.ReferenceType[Any] | None]

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
        clock.plugin_kwargs = gradient_accumulation_plugin.to_kwargs() if gradient_accumulation_plugin else {}
        # None stands first, so that the active loader is simply the last entry.
        clock.dataloader_references = [None]
        clock._is_xla_gradients_synced = False
        clock._counts = {}
        GradientState._newest = clock
        return clock

    _is_xla_gradients_synced: bool
    _counts: dict[Hashable, int]

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
        if value < 1:
            raise SettingError(f"gradient_accumulation_steps={value}: at least one micro-batch makes an update.")
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
        if self.sync_with_dataloader and self.end_of_dataloader:
            self._counts[key] = 0
            self.sync_gradients = True
        else:
            count = self._counts.get(key, 0) + 1
            self._counts[key] = count
            self.sync_gradients = count % self.num_steps == 0
        return self.sync_gradients

    @property
    def step(self) -> int:
        """Micro-batches begun since the last loader ended, over the window that is furthest."""
        return max(self._counts.values(), default=0)

    @step.setter
    def step(self, value: int) -> None:
        self._counts = dict.fromkeys(self._counts, value) or {(): value}

    def count_of(self, key: Hashable) -> int:
        """Micro-batches of ``key`` begun since the last loader ended."""
        return self._counts.get(key, 0)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    # -- the loaders -----------------------------------------------------------------------------------

    def _add_dataloader(self, dataloader: Any) -> None:
        self._remove_dataloader(dataloader)
        self.dataloader_references.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references = [
            reference
            for reference in self.dataloader_references
            if reference is None or (reference() is not None and reference() is not dataloader)
        ]

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

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )
