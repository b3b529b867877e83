"""The gradient accumulation state: which backward synchronises, when the optimizer steps, and the running loaders.

Each Accelerator has its own gradient state, which counts micro-batches per set of models. Loaders report when they
start and end, so the last batch of a loader always synchronises.
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
    """The micro-batches between two optimizer updates of one set of models."""

    count: int = 0  # micro-batches since the last loader ended
    is_complete: bool = True  # the current micro-batch is the last one
    has_gradients: bool = False  # a backward has run since the window began


@final
class WindowContext(AbstractContextManager[None]):
    """The context of a micro-batch; at its end, the enclosing window, if any, becomes current again.

    Args:
        outer: the models and the window of the enclosing context; None without one.
        unreduced: a context without gradient reduction, entered and left together with this one.
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
        if self._outer is not None:  # else the last window stays current, for a step after the block
            windows.current, window = self._outer
            self._gradient_state.return_to(window)
        return self._unreduced.__exit__(*error)


#: The current window (None: `advance` doesn't decide), whether it synchronises, and whether it protects gradients.
CurrentWindow = tuple[_Window | None, bool, bool]


class RunningLoader(Protocol):
    """The attributes of a prepared loader that the gradient state reads during the loader's loop."""

    end_of_dataloader: bool
    remainder: int
    is_interleaved: bool


class GradientState:
    """The accumulation state of one Accelerator.

    ``GradientState()`` without arguments returns the newest one in use (or a new one), as libraries that look for "the"
    gradient state expect. :meth:`create` always makes a new one.
    """

    # Weak: a gradient state lives as long as the Accelerator, optimizers and loaders that use it.
    _newest: ClassVar[weakref.ref[GradientState] | None] = None

    sync_gradients: bool
    #: Whether ``zero_grad`` would lose gradients that the current window still needs. Loops call it after the step or
    #: before the forward; before the forward of a window's last micro-batch, the earlier ones' gradients are needed.
    protects_gradients: bool
    plugin_kwargs: dict[str, Any]
    dataloader_references: list[weakref.ReferenceType[Any] | None]
    #: The number of ``step`` calls of prepared optimizers, without those inside an incomplete window.
    num_step_calls: int
    awaits_step: bool  # a backward has run since the last of these calls
    has_assumed_loader: bool  # whether AssumedLoaderWarning was given
    hooks: LoopHooks  # of this state's training loop
    #: Set while the update of a gradient scaler waits for optimizers that haven't stepped; called with True before a
    #: backward, and with False before a save.
    update_scaler: Callable[[bool], None] | None
    scaled_optimizers: weakref.WeakSet[Any]  # prepared optimizers with a gradient scaler
    nested_seconds: float  # time of passes over loaders inside another loader's pass, such as evaluations

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        newest = None if GradientState._newest is None else GradientState._newest()
        if newest is None:
            return cls.create(gradient_accumulation_plugin)
        if gradient_accumulation_plugin is not None:
            newest.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return newest

    @classmethod
    def create(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        """Make a gradient state, which becomes the newest."""
        gradient_state = object.__new__(cls)
        gradient_state.sync_gradients = True
        gradient_state.protects_gradients = False
        gradient_state.plugin_kwargs = gradient_accumulation_plugin.to_kwargs() if gradient_accumulation_plugin else {}
        # The first entry is None, so that the active loader is always the last entry.
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
    _window: _Window | None  # the current one; None if `advance` doesn't decide what synchronises
    _restored_open: bool  # their gradients were restored too
    _restored_count: int  # the count before an interruption, at which new windows begin

    # -- settings of the plugin ------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Always True, because a gradient state is usable once it exists."""
        return True

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer update."""
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
        """Whether the scheduler counts micro-batches without a step."""
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
        """Begin a micro-batch for the window of the models ``key``; return whether it synchronises gradients."""
        if self.hooks.between_batches and self.dataloader_references[-1] is None:
            for hook in self.hooks.between_batches:
                hook(None)
        window = self._windows.get(key)
        if window is None:
            is_open = self._restored_open
            window = self._windows[key] = _Window(self._restored_count, not is_open, has_gradients=is_open)
        self._window = window
        if window.is_complete:  # a new window: existing gradients are those of the last one
            window.has_gradients = False
        # This runs in every micro-batch, so it is fast: it doesn't use the properties below.
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
        """Make the enclosing window current again."""
        window, sync_gradients, protects_gradients = outer
        if window is None or window is not self._window:
            self._window, self.protects_gradients = window, protects_gradients
            self.sync_gradients = sync_gradients if window is None else window.is_complete

    def note_backward(self, loss: object = None, weight: object = None) -> int:
        """Count a backward in the current micro-batch; return the number of micro-batches that divides its loss.

        Args:
            loss: None if it isn't known before the backward.
            weight: the number of items in the summed loss; None if it is a mean.
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
        """Make a pending update of the gradient scaler now, instead of before the next backward."""
        if self.update_scaler is not None:
            self.update_scaler(False)

    def has_unfinished(self, *, before_backward: bool = False) -> bool:
        """Return whether a window has gradients and is incomplete.

        With ``before_backward``, the current window counts as incomplete in its last micro-batch too.
        """
        current = self._window if before_backward else None
        return any(w.has_gradients and (w is current or not w.is_complete) for w in self._windows.values())

    @property
    def num_backwards(self) -> int:
        """The number of backward passes so far."""
        return self._num_backwards

    @property
    def open_window(self) -> tuple[int, int] | None:
        """The number of micro-batches in the open window, and the number per update; None if no window is open."""
        steps = self.num_steps
        counts = [window.count for window in self._windows.values() if window.has_gradients and not window.is_complete]
        if self._restored_open and not self._windows:  # loaded, but not continued yet
            counts = [self._restored_count]
        return (max(count % steps for count in counts), steps) if counts else None

    @property
    def progress(self) -> tuple[int, int]:
        """The number of backward passes and the steps of the running loader, as a sign of progress."""
        progress = getattr(self.active_dataloader, "progress", None)  # other packages' loaders have none
        return self._num_backwards, getattr(getattr(progress, "batch_info", None), "steps", 0)

    @property
    def step(self) -> int:
        """The number of micro-batches since the last loader ended, in the window with the most."""
        return max((window.count for window in self._windows.values()), default=self._restored_count)

    @step.setter
    def step(self, value: int) -> None:
        self._windows.clear()
        self._window = None
        self._restored_count, self._restored_open = value, False
        self.protects_gradients = False

    @property
    def windows(self) -> dict[Any, int]:
        """The number of micro-batches since the last loader ended, by the models of the window."""
        return {key: window.count for key, window in self._windows.items()}

    def continue_windows(self, windows: Mapping[Hashable, int]) -> None:
        """Continue inside these windows, and in those from :attr:`step` on with gradients already."""
        self.protects_gradients = True
        self._restored_open = self._restored_count % self.num_steps != 0
        for key, count in windows.items():
            is_open = count % self.num_steps != 0
            self._windows[key] = _Window(count, not is_open, has_gradients=is_open)

    def count_of(self, key: Hashable) -> int:
        """Return the number of micro-batches of ``key`` since the last loader ended."""
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
        """The loaders with running loops; the one that yielded last is at the end."""
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
        """The number of samples in the active loader's last, incomplete global batch; -1 if unknown or without one."""
        loader: RunningLoader | None = self.active_dataloader
        return -1 if loader is None else loader.remainder

    # -- the documented interface of the shared state --------------------------------------------------

    @staticmethod
    def _reset_state() -> None:
        """Clear the newest gradient state; Accelerators keep theirs."""
        GradientState._newest = None

    def __reduce__(self) -> tuple[object, ...]:
        # A gradient state belongs to one training loop; an unpickled object uses the newest state of its process.
        return (_newest_or_new, (self.plugin_kwargs,))

    def __deepcopy__(self, memo: Mapping[int, object]) -> GradientState:
        """Return the same object, because a copied optimizer belongs to the same training loop."""
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
# Weighted losses: gradients of the mean over all items of ranks and micro-batches of different sizes
#
# A mean of means is wrong if micro-batches differ in size. Given the sum and its number of items (tokens, samples), the
# whole window is divided once, by its total weight over all data-parallel ranks.

logger: MultiProcessAdapter = get_logger(__name__)

Backward = Callable[[torch.Tensor], None]


@final
class WindowWeights:
    """The total weights of the open accumulation windows so far, by the models of the window."""

    def __init__(self, mesh: Mesh, gradient_state: GradientState, windows: NamedWindows) -> None:
        self._mesh, self._gradient_state, self._windows = mesh, gradient_state, windows
        #: The weight so far of every window with weighted micro-batches.
        self.pending: dict[WindowKey, Any] = {}
        self._has_warned = False  # a warning that the device has no float64
        self._has_windows = False  # with several micro-batches, so far

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
        """Raise if the window has several micro-batches, which the strategy can't weight.

        Raises:
            PreparationError: the window has several micro-batches.
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
        """Run ``backward(loss)``; if it completes the window, scale the gradients to those of the weighted mean.

        Args:
            models: returns the prepared models.
            one_backward: why a window can't have several micro-batches; "" if it can.
        """
        completes_window = self._gradient_state.sync_gradients
        if one_backward:
            self._refuse_open_window(one_backward, completes_window=completes_window)
        # Whether windows have several micro-batches on some rank; at the end of unequal data, this rank's window may
        # have one. All ranks have to scale at the same point: either the loss or the reduced gradients.
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
        if not accumulates:  # windows of one: scale the loss instead of the gradients
            backward(loss * factor)
            return
        backward(loss)
        parameters = self._windows.parameters(models(), self._gradient_state.windows, self.pending)
        gradients = [_own_piece(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            scale_each(gradients, factor)

    def _factor(self, total: object, loss: torch.Tensor) -> torch.Tensor:
        """Return the number of ranks divided by the total weight, to the precision of ``loss``.

        The strategy divides by the number of ranks (along TOKEN_AXES), but the mean has to divide by the weight.
        Weights are summed in float64, because float32 can't count more than 2^24 tokens.
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
        # A factor in a wider dtype than the loss would widen the loss, and all that is computed from it.
        return factor.to(torch.promote_types(loss.dtype, torch.float32))


def wide(weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return a weight in a dtype that can be summed without rounding; bfloat16 can't count above 256."""
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.detach().to(widest_float(weight.device))
    return weight


def _own_piece(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's local part of ``gradient``, because torch can't scale different placements together."""
    local = getattr(gradient, "to_local", None)
    return gradient if local is None else local()
