"""The base class of trackers: the interface through which ``Accelerator.log`` writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast, final

import numpy as np
import torch

from ..distributed.world import current_world
from .background_queue import BackgroundQueue

Method = TypeVar("Method", bound=Callable[..., Any])

_REQUIRED_ATTRIBUTES = ("name", "requires_logging_directory", "tracker")


def writes_here(*, main_process_only: bool = True) -> bool:
    """Return whether this process writes to a tracker; before the world is joined, every process does."""
    world = current_world()
    return not main_process_only or world is None or world.is_main


def on_main_process(function: Method) -> Method:
    """Make a tracker method do nothing off the main process where the tracker is ``main_process_only``."""

    @functools.wraps(function)
    def guarded(self: GeneralTracker, *args: object, **kwargs: object) -> object:
        if writes_here(main_process_only=self.main_process_only):
            return function(self, *args, **kwargs)
        return None

    return cast(Method, guarded)


def queued(function: Method) -> Method:
    """Make a tracker method run on the tracker's own thread, after the calls that were queued before.

    While the tracker has no such thread (before ``init_trackers``, after the end, built by hand), it is called at once.
    Off the main process it does nothing where the tracker is ``main_process_only``.
    """

    @functools.wraps(function)
    def guarded(self: GeneralTracker, *args: object, **kwargs: object) -> object:
        if not writes_here(main_process_only=self.main_process_only):
            return None
        queue = self._background_queue
        if queue is None or queue.is_current_thread:
            return function(self, *args, **kwargs)
        return queue.put(functools.partial(function, self), function.__name__, *args, **kwargs)

    return cast(Method, guarded)


def as_numbers(values: Mapping[str, object]) -> dict[str, object]:
    """Return ``values`` with tensors and arrays of one element, and NumPy's numbers, as Python's numbers."""
    return {
        key: value.item()
        if isinstance(value, np.generic)
        or (isinstance(value, (torch.Tensor, np.ndarray)) and (value.ndim == 0 or value.shape == (1,)))
        else value
        for key, value in values.items()
    }


class GeneralTracker:
    """The base class of all trackers; a subclass talks to one tracking service.

    A subclass has three attributes of its class:

    - ``name`` (`str`): how ``log_with`` and ``get_tracker`` call it.
    - ``requires_logging_directory`` (`bool`): whether it can't do without a ``logging_dir``.
    - ``tracker`` (property): the service's own object, for what this interface doesn't cover.

    and overrides the four methods. Its constructor remembers arguments only; the service is contacted in
    ``start``. Methods that must run on the main process only carry :func:`on_main_process`.

    Which thread calls: ``start`` and ``store_init_configuration`` are called by the thread that calls
    ``init_trackers``, and so are ``log`` and ``finish``: what was logged can be read back at once. A failure there is
    logged once and costs that record, not the run. With ``logs_in_background = True``, as in the trackers of services,
    ``Accelerator.log`` only notes what is to be logged, and a thread that belongs to this tracker calls ``log``: one
    call at a time, in order, ``finish`` last.

    Attributes:
        logs_in_background: whether ``log`` and ``finish`` run on a thread of their own.
        queue_limit_bytes: how much may wait there; what comes on top is left out, and counted.
        finish_timeout_seconds: how long ``end_training`` waits for what is still waiting, and for ``finish``.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True
    logs_in_background: bool = False
    queue_limit_bytes: int = 256 * 2**20
    finish_timeout_seconds: float = 60.0
    _background_queue: BackgroundQueue | None = None  # from `init_trackers` to the end

    def __init__(self, _blank: bool = False) -> None:
        """Check the class's attributes; with ``_blank=True``, make a tracker on which the four methods do nothing."""
        if _blank:
            return
        # The class is checked, not the instance: a `tracker` property may not be readable before `start`.
        declared = {*vars(self), *dir(type(self))}
        missing = [f"`{name}`" for name in _REQUIRED_ATTRIBUTES if name not in declared]
        if missing:
            raise NotImplementedError(
                f"The tracker class {type(self).__name__} lacks {', '.join(missing)}. Define "
                f"{'it' if len(missing) == 1 else 'them'} in the class (`tracker` as a property)."
            )

    def start(self) -> None:
        """Connect to the service. Called once, by ``Accelerator.init_trackers``."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` as the hyper-parameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log ``values`` at ``step``; ``kwargs`` go to the service's own call."""

    def finish(self) -> None:
        """Send everything that was logged, and close the run."""

    def _leave_thread(self) -> None:
        """Release the service's data for the thread that called ``start``; called there, after ``finish``."""


@final
class BlankTracker(GeneralTracker):
    """A tracker that accepts everything and does nothing, under the name of a missing one.

    Off the main process, and for a service that could not start. Whatever a script calls on it, or on its service's own
    object, does nothing as well.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and copying look up on every object
            raise AttributeError(name)
        return _NOTHING


@final
class _Nothing:
    """Called, or asked for an attribute, it is itself."""

    def __call__(self, *args: object, **kwargs: object) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_NOTHING = _Nothing()
