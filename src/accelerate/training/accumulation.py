"""The gradient accumulation state: which backward synchronises, and when the optimizer steps.

Each Accelerator has its own gradient state, which counts micro-batches per set of models. Loaders report when they
start and end, so the last batch of a loader always synchronises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Protocol, final

import torch

from ..errors import PreparationError, SettingError
from ..seams import LoopHooks

if TYPE_CHECKING:
    from ..plugins.handlers import GradientAccumulationPlugin

# -- running loaders ---------------------------------------------------------------------------------------


class RunningLoader(Protocol):
    """The attributes of a prepared loader that are read during the loader's loop."""

    end_of_dataloader: bool
    remainder: int
    is_interleaved: bool


@final
class RunningLoaders:
    """The loaders with running loops in one training loop; the one that yielded last is at the end."""

    def __init__(self) -> None:
        self.references: list[weakref.ReferenceType[Any]] = []
        self.nested_seconds: float = 0.0  # time of passes inside another loader's pass, such as evaluations
        self.has_assumed_loader: bool = False  # whether AssumedLoaderWarning was given

    def add(self, loader: RunningLoader, *, is_interleaved: bool = False) -> None:
        """Make ``loader`` the active one; ``is_interleaved`` if its loop and the active one's alternate."""
        active = self.active
        if is_interleaved and active is not None:
            active.is_interleaved = loader.is_interleaved = True
        self.remove(loader)
        self.references.append(weakref.ref(loader))

    def remove(self, loader: object) -> None:
        """Remove ``loader``, whose loop has ended."""
        self.references = [one for one in self.references if (held := one()) is not None and held is not loader]

    def all(self) -> list[RunningLoader]:
        """Return the loaders; the one that yielded last is at the end."""
        return [loader for loader in (reference() for reference in self.references) if loader is not None]

    @property
    def active(self) -> RunningLoader | None:
        """The loader that yielded last; None outside of loops."""
        return self.references[-1]() if self.references else None


# -- models named in `accumulate` --------------------------------------------------------------------------
#
# They are found by their parameters, so that wrappers, lists and parts work too.

#: Identifies a window by its models: for each model, its number in the order of preparation; for a part, that number
#: and the indices of the part's parameters in the model. Empty: all models. A set of ids if the models are unknown.
WindowKey = tuple[int | tuple[int, ...], ...] | frozenset[int]

_MAX_KNOWN: Final = 64  # number of cached accumulate() calls


@final
@dataclass(frozen=True, slots=True)
class NamedModels:
    """The objects named in a call of ``accumulate``, and their prepared models.

    Args:
        named: the given objects; kept alive, so that no other object gets one of their ids.
        key: the key of their window.
        models: the numbers of the prepared models whose gradients the window has; None if unknown.
        unreduced: the modules whose gradients aren't reduced before the window ends.
    """

    named: tuple[object, ...]
    key: WindowKey
    models: Sequence[int] | None
    unreduced: Sequence[torch.nn.Module]

    @classmethod
    def find(cls, named: tuple[Any, ...], prepared: Sequence[torch.nn.Module]) -> NamedModels:
        """Find the models among ``prepared`` that share parameters with ``named``."""
        key: set[int | tuple[int, ...]] = set()
        unknown: list[Any] = []
        for given in named:
            found = set(_parts_in(given, prepared))
            key |= found
            if not found:
                unknown.append(given)
        numbers = numbers_in(key)
        modules = [one for one in unknown if isinstance(one, torch.nn.Module)]
        unreduced = [*modules, *(prepared[number] for number in numbers)]
        if unknown:
            return cls(named, frozenset(map(id, named)), None, unreduced)
        return cls(named, tuple(sorted(key, key=str)), numbers, unreduced)

    def refuse_weight(self) -> NoReturn:
        """Raise, because a weight can't divide gradients of unknown models.

        Raises:
            PreparationError: the text has the classes of the named objects.
        """
        raise PreparationError(
            f"backward(loss, weight=...) inside accumulate({', '.join(type(one).__name__ for one in self.named)}): not "
            "all of them contain, or are part of, a prepared model, so the gradients to divide by the window's total "
            "weight are unknown. Give accumulate() prepared models."
        )


@final
class NamedWindows:
    """The models named in the ``accumulate`` calls so far, and those of the last call."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], NamedModels] = {}
        self.depth = 0  # number of accumulate() contexts that the loop is in
        self.forget()

    def forget(self) -> None:
        """Clear all models; the current window then has the gradients of any model."""
        self.known.clear()
        self.current: NamedModels = NamedModels((), (), (), ())

    def find(self, named: tuple[Any, ...], prepared: Sequence[torch.nn.Module]) -> NamedModels:
        """Find the models of ``named``, and cache them."""
        if len(self.known) > _MAX_KNOWN:  # the loop makes a new list or wrapper in each micro-batch
            self.known.clear()
        found = self.known[tuple(map(id, named))] = NamedModels.find(named, prepared)
        return found

    def unreduced_by(self, model: torch.nn.Module, prepared: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
        """Return the modules in which ``no_sync(model)`` reduces no gradients; a part may be sharded by itself."""
        found = self.known.get((id(model),)) or self.find((model,), prepared)
        return [model] if any(isinstance(one, tuple) for one in found.key) else found.unreduced

    def parameters(
        self, prepared: Sequence[torch.nn.Module], windows: Iterable[Any], pending: Collection[Any]
    ) -> Iterator[torch.nn.Parameter]:
        """Iterate over the parameters of the current window's models, and of models not named in ``windows``.

        Args:
            pending: the other windows with weights.

        Raises:
            PreparationError: the window of a model's gradients is unknown.
        """
        current = self.current
        if current.models is None:
            current.refuse_weight()
        of_windows = {number for key in windows for number in numbers_in(key)}
        for number, model in enumerate(prepared):
            if current.key and number not in current.models:
                if number in of_windows:
                    continue
                if pending and any(parameter.grad is not None for parameter in model.parameters()):
                    raise PreparationError(
                        f"backward(loss, weight=...): no accumulate() names {type(model).__name__}, which has "
                        "gradients while two windows are open, so the total weight to divide them by is unknown. "
                        "Name it in the accumulate() of the losses that train it."
                    )
            yield from model.parameters()


def _parts_in(given: Any, prepared: Sequence[torch.nn.Module]) -> Iterator[int | tuple[int, ...]]:
    """Iterate over the models and parts of models in ``given``."""
    if not isinstance(given, torch.nn.Module):
        return
    inside, rest = list(given.modules()), set(map(id, given.parameters()))
    own = [list(map(id, model.parameters())) for model in prepared]
    whole = [
        number
        for number, model in enumerate(prepared)
        if any(model is one for one in inside) or (own[number] and rest.issuperset(own[number]))
    ]
    yield from whole
    rest.difference_update(*(own[number] for number in whole))  # tied parameters belong to the complete models
    for number, model in enumerate(prepared):
        is_inside = not rest.isdisjoint(own[number]) or any(given is one for one in model.modules())
        if number not in whole and is_inside:
            yield number, *(place for place, one in enumerate(own[number]) if one in rest)


def numbers_in(key: Iterable[Any]) -> list[int]:
    """Return the sorted numbers of the models in a :data:`WindowKey`."""
    return sorted({part[0] if isinstance(part, tuple) else part for part in key})


def overlap(one: WindowKey, other: WindowKey) -> bool:
    """Return whether two windows may have gradients of the same model."""
    return not one or not other or not set(numbers_in(one)).isdisjoint(numbers_in(other))


# -- the state ---------------------------------------------------------------------------------------------


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
    is_xla_gradients_synced: bool  # the XLA gradients of this window have been reduced already
    plugin_kwargs: dict[str, Any]
    loaders: RunningLoaders
    #: The number of ``step`` calls of prepared optimizers, without those inside an incomplete window.
    num_step_calls: int
    #: The weight of this rank's mean losses, whose mean over all ranks is 1; it differs if their batches do.
    mean_weight: float
    awaits_step: bool  # a backward has run since the last of these calls
    hooks: LoopHooks  # of this state's training loop
    #: Set while the update of a gradient scaler waits for optimizers that haven't stepped; called with True before a
    #: backward, and with False before a save.
    update_scaler: Callable[[bool], None] | None
    scaled_optimizers: weakref.WeakSet[Any]  # prepared optimizers with a gradient scaler

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
        gradient_state.loaders = RunningLoaders()
        gradient_state.is_xla_gradients_synced = False
        gradient_state._windows = {}
        gradient_state._window = None
        gradient_state._restored_count = 0
        gradient_state._restored_open = False
        gradient_state._num_backwards = gradient_state.num_step_calls = 0
        gradient_state.awaits_step = False
        gradient_state.mean_weight = 1
        gradient_state.update_scaler = None
        gradient_state.hooks = LoopHooks()
        gradient_state.scaled_optimizers = weakref.WeakSet()
        GradientState._newest = weakref.ref(gradient_state)
        return gradient_state

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

    # -- the count -------------------------------------------------------------------------------------

    def advance(self, key: Hashable = ()) -> bool:
        """Begin a micro-batch for the window of the models ``key``; return whether it synchronises gradients."""
        if self.hooks.between_batches and not self.loaders.references:
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
        settings, running = self.plugin_kwargs, self.loaders.references
        loader = running[-1]() if running else None
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

    def note_backward(self, loss: object = None, weight: object = None) -> float:
        """Count a backward in the current micro-batch; return the number that divides its mean loss.

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
        return self.plugin_kwargs.get("num_steps", 1) / self.mean_weight

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
        progress = getattr(self.loaders.active, "progress", None)  # other packages' loaders have none
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

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients
        self.protects_gradients = not sync_gradients
        self._window = None

    # -- the documented names of the running loaders -----------------------------------------------------

    def _add_dataloader(self, dataloader: RunningLoader) -> None:
        self.loaders.add(dataloader)

    def _remove_dataloader(self, dataloader: object) -> None:
        self.loaders.remove(dataloader)

    @property
    def dataloader_references(self) -> list[weakref.ReferenceType[Any] | None]:
        """Weak references to the loaders with running loops, after None."""
        return [None, *self.loaders.references]

    @property
    def active_dataloader(self) -> RunningLoader | None:
        """The innermost loader whose loop is running; None outside of loops."""
        return self.loaders.active

    @property
    def in_dataloader(self) -> bool:
        """Whether the loop of a prepared loader is running."""
        return self.loaders.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of the active loader."""
        loader = self.loaders.active
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of samples in the active loader's last, incomplete global batch; -1 if unknown or without one."""
        loader = self.loaders.active
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
