"""The accumulation state: gradient synchronisation per backward, updates per step, and running loaders.

Each Accelerator owns one gradient state; a loop with two Accelerators, or with two models that accumulate
differently, keeps one count per model. Loaders report when they start and end, so that the last batch of a loader
always synchronises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, final

import torch

from ..devices.table import widest_float
from ..distributed.collectives import reduce
from ..distributed.mesh import TOKEN_AXES, Mesh
from ..errors import PreparationError, SettingError
from ..logging import MultiProcessAdapter, get_logger
from ..seams import LoopHooks
from ..torch_private.modules import scale_each
from .named_models import NamedModels, NamedWindows, WindowKey, overlap

if TYPE_CHECKING:
    from ..plugins.handlers import GradientAccumulationPlugin


@final
@dataclass(slots=True)
class _Window:
    """The micro-batches between two updates of one set of models."""

    count: int = 0  # micro-batches begun since the last loader ended
    is_complete: bool = True  # the current micro-batch is the last one
    has_gradients: bool = False  # a backward has run since the window began


@final
class WindowContext(AbstractContextManager[None]):
    """The context of a micro-batch; at its end the window around it, if there is one, is the current one again.

    Args:
        outer: the models and the window that were current before; None outside of other windows.
        unreduced: entered with it.
    """

    __slots__ = ("_gradient_state", "_outer", "_unreduced", "_windows")

    def __init__(
        self,
        gradient_state: GradientState,
        windows: NamedWindows,
        outer: tuple[NamedModels, CurrentWindow] | None,
        unreduced: AbstractContextManager[object],
    ) -> None:
        self._gradient_state, self._windows, self._outer, self._unreduced = gradient_state, windows, outer, unreduced

    def __enter__(self) -> None:
        self._unreduced.__enter__()
        self._windows.depth += 1

    def __exit__(self, *error: Any) -> bool | None:
        windows = self._windows
        windows.depth -= 1
        if self._outer is not None:  # outside of all of them the last one stays: loops step, and look, after the block
            windows.current, window = self._outer
            self._gradient_state.return_to(window)
        return self._unreduced.__exit__(*error)


#: The current window (None: somebody else decides), whether it synchronises, and whether it protects gradients.
CurrentWindow = tuple[_Window | None, bool, bool]


class RunningLoader(Protocol):
    """The attributes of a prepared loader that the gradient state reads while the loader's loop runs."""

    end_of_dataloader: bool
    remainder: int
    is_interleaved: bool


class GradientState:
    """The accumulation state of one Accelerator.

    ``GradientState()`` without arguments is the newest one that is in use (a new one when there is none), which is
    what libraries that look for "the" gradient state expect. :meth:`create` always makes a new one.
    """

    # Weak: a gradient state goes with the Accelerator, optimizers and loaders that use it.
    _newest: ClassVar[weakref.ref[GradientState] | None] = None

    sync_gradients: bool
    #: Whether ``zero_grad`` would now lose gradients that the current window still needs. A loop may clear at its end,
    #: after the step, or at its top, before the forward; at the top of a window's last micro-batch the gradients of
    #: the earlier ones are still wanted.
    protects_gradients: bool
    plugin_kwargs: dict[str, Any]
    dataloader_references: list[weakref.ReferenceType[Any] | None]
    #: Calls of prepared optimizers' ``step`` that weren't inside of a window.
    num_step_calls: int
    awaits_step: bool  # a backward has run since the last of these calls
    has_assumed_loader: bool  # a warning was given: values between batches of several loaders could be those of any
    hooks: LoopHooks  # of the loop that this state counts
    #: While the update of a gradient scaler waits for optimizers that haven't stepped: called with True before a
    #: backward, and with False before a save.
    update_scaler: Callable[[bool], None] | None
    scaled_optimizers: weakref.WeakSet[Any]  # prepared ones, with a gradient scaler
    nested_seconds: float  # of passes over loaders inside of another loader's pass, as evaluations in the middle are

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        newest = None if GradientState._newest is None else GradientState._newest()
        if newest is None:
            return cls.create(gradient_accumulation_plugin)
        if gradient_accumulation_plugin is not None:
            newest.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return newest

    @classmethod
    def create(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Make a gradient state, from now on the newest."""
        gradient_state = object.__new__(cls)
        gradient_state.sync_gradients = True
        gradient_state.protects_gradients = False
        gradient_state.plugin_kwargs = gradient_accumulation_plugin.to_kwargs() if gradient_accumulation_plugin else {}
        # None is the first entry, so that the active loader is simply the last entry.
        gradient_state.dataloader_references = [None]
        gradient_state._is_xla_gradients_synced = False
        gradient_state._windows = {}
        gradient_state._window = None
        gradient_state._restored_count = 0
        gradient_state._restored_open = False
        gradient_state._num_backwards = gradient_state.num_step_calls = 0
        gradient_state.awaits_step = False
        gradient_state.has_assumed_loader = False
        gradient_state.update_scaler = None
        gradient_state.hooks = LoopHooks()
        gradient_state.scaled_optimizers = weakref.WeakSet()
        gradient_state.nested_seconds = 0.0
        GradientState._newest = weakref.ref(gradient_state)
        return gradient_state

    _is_xla_gradients_synced: bool
    _num_backwards: int
    _windows: dict[Hashable, _Window]
    _window: _Window | None  # the current one; None where somebody else than `advance` decides what synchronises
    _restored_open: bool  # the gradients of such windows were restored too
    _restored_count: int  # where windows begin that are not known yet: their count before an interruption

    # -- settings of the plugin ------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True: a gradient state is usable as soon as it exists."""
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
        """Begin a micro-batch of ``key`` (the models of the window); return whether it synchronises gradients."""
        if self.hooks.between_batches and self.dataloader_references[-1] is None:
            for hook in self.hooks.between_batches:
                hook(None)
        window = self._windows.get(key)
        if window is None:
            is_open = self._restored_open
            window = self._windows[key] = _Window(self._restored_count, not is_open, has_gradients=is_open)
        self._window = window
        if window.is_complete:  # a new window: the gradients are those of the last one
            window.has_gradients = False
        # This runs in every micro-batch, so the properties below are written out.
        settings, reference = self.plugin_kwargs, self.dataloader_references[-1]
        loader = None if reference is None else reference()
        if loader is not None and loader.end_of_dataloader and settings.get("sync_with_dataloader", True):
            window.count = self._restored_count = 0
            self._restored_open = False
            is_complete = True
        else:
            window.count += 1
            is_complete = window.count % settings.get("num_steps", 1) == 0
        window.is_complete = self.sync_gradients = is_complete
        self.protects_gradients = window.has_gradients
        return is_complete

    @property
    def current(self) -> CurrentWindow:
        """The current window, for :meth:`return_to`."""
        return self._window, self.sync_gradients, self.protects_gradients

    def return_to(self, outer: CurrentWindow) -> None:
        """Make the window around the current one the current one again."""
        window, sync_gradients, protects_gradients = outer
        if window is None or window is not self._window:
            self._window, self.protects_gradients = window, protects_gradients
            self.sync_gradients = sync_gradients if window is None else window.is_complete

    def note_backward(self, loss: object = None, weight: object = None) -> int:
        """Count a backward in the current micro-batch; return by how many micro-batches its loss is divided.

        Args:
            loss: None: it isn't known before the backward.
            weight: how many items the loss sums over; None: it is a mean.
        """
        for hook in self.hooks.before_backward:
            hook(loss, weight)
        if self.update_scaler is not None:
            self.update_scaler(True)
        self._num_backwards += 1
        self.awaits_step = True
        if self._window is not None:
            self._window.has_gradients = True
        self.protects_gradients = not self.sync_gradients
        return self.plugin_kwargs.get("num_steps", 1)

    def finish_window(self) -> None:
        """Make the update of the gradient scaler that would come before the next backward."""
        if self.update_scaler is not None:
            self.update_scaler(False)

    def has_unfinished(self, *, before_backward: bool = False) -> bool:
        """Return whether a window has gradients and more to come: also the current one's last, ``before_backward``."""
        current = self._window if before_backward else None
        return any(w.has_gradients and (w is current or not w.is_complete) for w in self._windows.values())

    @property
    def num_backwards(self) -> int:
        """Backwards so far."""
        return self._num_backwards

    @property
    def open_window(self) -> tuple[int, int] | None:
        """The micro-batches accumulated in the open window, and how many make an update; None: no window is open."""
        steps = self.num_steps
        counts = [window.count for window in self._windows.values() if window.has_gradients and not window.is_complete]
        if self._restored_open and not self._windows:  # loaded, and not gone on yet
            counts = [self._restored_count]
        return (max(count % steps for count in counts), steps) if counts else None

    @property
    def progress(self) -> tuple[int, int]:
        """Backwards so far, and steps of the running loader: two numbers that change while the loop goes on."""
        progress = getattr(self.active_dataloader, "progress", None)  # loaders of others have none
        return self._num_backwards, getattr(getattr(progress, "batch_info", None), "steps", 0)

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
    def windows(self) -> dict[Any, int]:
        """By models, the micro-batches begun since the last loader ended."""
        return {key: window.count for key, window in self._windows.items()}

    def continue_windows(self, windows: Mapping[Hashable, int]) -> None:
        """Continue inside these windows, and in those that begin at :attr:`step`: they have gradients already."""
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

    def _add_dataloader(self, dataloader: RunningLoader, *, is_interleaved: bool = False) -> None:
        active = self.active_dataloader
        if is_interleaved and active is not None:
            active.is_interleaved = dataloader.is_interleaved = True
        self._remove_dataloader(dataloader)
        self.dataloader_references.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: object) -> None:
        self.dataloader_references = [
            reference
            for reference in self.dataloader_references
            if reference is None or (reference() is not None and reference() is not dataloader)
        ]

    @property
    def running_dataloaders(self) -> list[RunningLoader]:
        """The loaders with running loops; the last to deliver is at the end."""
        found = (reference() for reference in self.dataloader_references if reference is not None)
        return [loader for loader in found if loader is not None]

    @property
    def active_dataloader(self) -> RunningLoader | None:
        """The innermost loader whose loop is running; None outside of loops."""
        reference = self.dataloader_references[-1]
        return None if reference is None else reference()

    @property
    def in_dataloader(self) -> bool:
        """Whether the loop of a prepared loader is running."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of the active loader."""
        loader: RunningLoader | None = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last, incomplete global batch of the active loader; -1 when unknown or outside."""
        loader: RunningLoader | None = self.active_dataloader
        return -1 if loader is None else loader.remainder

    # -- the documented interface of the shared state --------------------------------------------------

    @staticmethod
    def _reset_state() -> None:
        """Forget the newest gradient state; Accelerators keep theirs."""
        GradientState._newest = None

    def __reduce__(self) -> tuple[object, ...]:
        # A gradient state belongs to the loop that it counts; an unpickled object uses the newest one of its process.
        return (_newest_or_new, (self.plugin_kwargs,))

    def __deepcopy__(self, memo: Mapping[int, object]) -> GradientState:
        """Return the same object: a copied optimizer belongs to the same loop."""
        return self

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _newest_or_new(plugin_kwargs: dict[str, Any]) -> GradientState:
    is_first = GradientState._newest is None
    gradient_state = GradientState()
    if is_first:
        gradient_state.plugin_kwargs = plugin_kwargs
    return gradient_state


# --------------------------------------------------------------------------------------------------
# Weighted losses: gradients of the true mean over ranks and micro-batches of different sizes
#
# A mean of means is wrong as soon as micro-batches differ in size. Given the sum and the number it is a sum over
# (tokens, samples), the whole window is divided once, by its total weight over all data-parallel ranks.

logger: MultiProcessAdapter = get_logger(__name__)

Backward = Callable[[torch.Tensor], None]


@final
class WindowWeights:
    """The total weights so far of the open accumulation windows, by the models of the window."""

    def __init__(self, mesh: Mesh, gradient_state: GradientState, windows: NamedWindows) -> None:
        self._mesh, self._gradient_state, self._windows = mesh, gradient_state, windows
        #: The weight so far of every window that has weighted micro-batches behind it.
        self.pending: dict[WindowKey, Any] = {}
        self._has_warned = False  # that the device has no float64
        self._has_windows = False  # of several micro-batches, so far

    def refuse_unweighted(self) -> None:
        """Raise if the current window already has weighted micro-batches.

        Raises:
            PreparationError: ``backward(loss)`` after ``backward(loss, weight=...)`` in one window.
        """
        if any(overlap(self._windows.current.key, other) for other in self.pending):
            raise PreparationError(
                "backward(loss) without a weight, in a window whose earlier micro-batches had one: the two can't be "
                "averaged together. Pass weight= in every micro-batch of the window, or in none."
            )

    def _refuse_open_window(self, one_backward: str, *, completes_window: bool) -> None:
        """Raise unless this micro-batch is a whole window, where no more can be waited for.

        Raises:
            PreparationError: gradients are accumulated.
        """
        if self.pending or not completes_window:
            raise PreparationError(
                f"backward(loss, weight=...) over several micro-batches: {one_backward}, before their total weight can "
                "be divided out. Use gradient_accumulation_steps=1, FSDP or DDP, or a mean loss without weight=."
            )

    def backward(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | float,
        *,
        models: Callable[[], Sequence[torch.nn.Module]],
        backward: Backward,
        one_backward: str,
    ) -> None:
        """Run ``backward(loss)``; if it completes the window, scale gradients to those of the weighted mean.

        Args:
            models: the prepared ones.
            one_backward: why a window can't have several micro-batches; "": it can.
        """
        completes_window = self._gradient_state.sync_gradients
        if one_backward:
            self._refuse_open_window(one_backward, completes_window=completes_window)
        # Whether windows have several micro-batches, on some rank: this one's can be a single one all the same, at the
        # end of unequal data. What is scaled before ranks reduce gradients has to be scaled on all of them.
        accumulates = not one_backward and (self._gradient_state.num_steps != 1 or self._has_windows)
        window = self._windows.current
        key = window.key
        if window.models is None and (accumulates or not completes_window):
            window.refuse_weight()
        if self.pending and any(other != key and overlap(key, other) for other in self.pending):
            raise PreparationError(
                "backward(loss, weight=...) in two windows of accumulate() that share a model, and are open at once: "
                "their total weights can't be divided out of one gradient. Name the same models in both."
            )
        earlier = self.pending.pop(key, None)
        total = weight if earlier is None else wide(earlier) + wide(weight)
        if not completes_window:
            self.pending[key] = total
            self._has_windows = True
            backward(loss)
            return
        factor = self._factor(total, loss)
        if not accumulates:  # windows of one: scale the loss, and touch no gradient twice
            backward(loss * factor)
            return
        backward(loss)
        parameters = self._windows.parameters(models(), self._gradient_state.windows, self.pending)
        gradients = [_own_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            scale_each(gradients, factor)

    def _factor(self, total: object, loss: torch.Tensor) -> torch.Tensor:
        """Return ranks over total weight, exact to the precision of ``loss``.

        The strategy divides by the ranks that have tokens, the true mean divides by the weight. Weights are added up
        in float64: float32 can't count more than 2^24 tokens.
        """
        dtype = widest_float(loss.device)
        if dtype != torch.float64 and not self._has_warned:
            self._has_warned = True
            logger.warning_once(
                "backward(loss, weight=...): %s has no float64, so weights are added up, and losses scaled, in "
                "float32: exact to 1e-7, for up to 16777216 tokens in a window.",
                loss.device,
            )
        weight = torch.as_tensor(total, dtype=dtype, device=loss.device).detach()
        weight = reduce(weight, "sum", world=self._mesh.within(*TOKEN_AXES), same_shapes=True)
        factor = torch.where(weight > 0, self._mesh.size(*TOKEN_AXES) / weight, torch.zeros_like(weight))
        # A factor that is wider than the loss would widen it, and all that is computed from it.
        return factor.to(torch.promote_types(loss.dtype, torch.float32))


def wide(weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return a weight that more can be added to without rounding: bfloat16 can't count further than 256."""
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach().to(widest_float(weight.device))
    return weight


def _own_piece(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part of ``gradient``: gradients with different placements can't be scaled together."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()
