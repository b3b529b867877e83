"""The base class of trackers: the interface that ``Accelerator.log`` calls."""

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
    """Return whether this process writes to a tracker; before the world is known, every process does."""
    world = current_world()
    return not main_process_only or world is None or world.is_main


def on_main_process(function: Method) -> Method:
    """Decorate a tracker method to run only on the main process if the tracker is ``main_process_only``."""

    @functools.wraps(function)
    def guarded(self: GeneralTracker, *args: object, **kwargs: object) -> object:
        if writes_here(main_process_only=self.main_process_only):
            return function(self, *args, **kwargs)
        return None

    return cast(Method, guarded)


def queued(function: Method) -> Method:
    """Decorate a tracker method to run on the tracker's thread, after the calls queued before.

    If the tracker has no thread (before ``init_trackers``, after the end, or created by hand), it runs immediately. On
    other processes than the main one, it does nothing if the tracker is ``main_process_only``.
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
    """Return ``values`` with one-element tensors and arrays, and NumPy numbers, converted to Python numbers."""
    return {
        key: value.item()
        if isinstance(value, np.generic)
        or (isinstance(value, (torch.Tensor, np.ndarray)) and (value.ndim == 0 or value.shape == (1,)))
        else value
        for key, value in values.items()
    }


class GeneralTracker:
    """The base class of all trackers; a subclass talks to one tracking service.

    A subclass defines three class attributes:

    - ``name`` (`str`): its name for ``log_with`` and ``get_tracker``.
    - ``requires_logging_directory`` (`bool`): whether it needs a ``logging_dir``.
    - ``tracker`` (property): the service's own object, for features that this interface doesn't cover.

    and overrides the four methods. Its constructor only stores arguments; ``start`` contacts the service. Methods that
    must run on the main process only are decorated with :func:`on_main_process`.

    Threads: ``start``, ``store_init_configuration``, ``log`` and ``finish`` run on the caller's thread, so logged
    values can be read back immediately. A failure is logged once and loses that record, but the run continues. With
    ``logs_in_background = True``, as in the trackers of services, ``Accelerator.log`` only queues the values, and this
    tracker's own thread calls ``log``: one call at a time, in order, ``finish`` last.

    Attributes:
        logs_in_background: whether ``log`` and ``finish`` run on a thread of their own.
        queue_limit_bytes: the maximum size of the queue; calls that exceed it are dropped and counted.
        finish_timeout_seconds: how long ``end_training`` waits for the queued calls and for ``finish``.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True
    logs_in_background: bool = False
    queue_limit_bytes: int = 256 * 2**20
    finish_timeout_seconds: float = 60.0
    _background_queue: BackgroundQueue | None = None  # from `init_trackers` to the end

    def __init__(self, _blank: bool = False) -> None:
        """Check the class attributes; with ``_blank=True``, create a tracker whose four methods do nothing."""
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
        """Send all logged values, and close the run."""

    def _leave_thread(self) -> None:
        """Release the service's data of the thread that called ``start``; called on it, after ``finish``."""


@final
class BlankTracker(GeneralTracker):
    """A tracker that accepts every call and does nothing, with the name of a missing tracker.

    It is used on other processes than the main one, and for a service that could not start. All calls of a script on
    it, or on its service's own object, do nothing too.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and `copy` look these up on every object
            raise AttributeError(name)
        return _NOTHING


@final
class _Nothing:
    """An object that returns itself for every call and every attribute."""

    def __call__(self, *args: object, **kwargs: object) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_NOTHING = _Nothing()
