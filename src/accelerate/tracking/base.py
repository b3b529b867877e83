"""The contract for trackers: what a class must have so that ``Accelerator.log`` can write through it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from ..world import current_world

Method = TypeVar("Method", bound=Callable[..., Any])

_REQUIRED_ATTRIBUTES = ("name", "requires_logging_directory", "tracker")


def writes_here(*, main_process_only: bool = True) -> bool:
    """Whether this process writes to a tracker; before the world is joined, every process does."""
    world = current_world()
    return not main_process_only or world is None or world.is_main


def on_main_process(function: Method) -> Method:
    """The tracker method, doing nothing off the main process where the tracker is ``main_process_only``."""

    @functools.wraps(function)
    def guarded(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if writes_here(main_process_only=self.main_process_only):
            return function(self, *args, **kwargs)
        return None

    return cast(Method, guarded)


class GeneralTracker:
    """The base of every tracker, ours and yours; a subclass talks to one tracking service.

    A subclass has three attributes of its class:

    - ``name`` (`str`): how ``log_with`` and ``get_tracker`` call it.
    - ``requires_logging_directory`` (`bool`): whether it can't do without a ``logging_dir``.
    - ``tracker`` (property): the service's own object, for what this interface doesn't cover.

    and overrides the four methods. Its constructor remembers arguments only; the service is contacted in
    ``start``. Methods that must run on the main process only carry :func:`on_main_process`.

    ``_blank=True`` makes a tracker that accepts everything and does nothing; ``get_tracker`` returns one
    off the main process.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        # The class is asked, not the instance: a `tracker` property may not be readable before `start`.
        declared = {*vars(self), *dir(type(self))}
        missing = [f"`{name}`" for name in _REQUIRED_ATTRIBUTES if name not in declared]
        if missing:
            raise NotImplementedError(
                f"The tracker class {type(self).__name__} lacks {', '.join(missing)}. Define "
                f"{'it' if len(missing) == 1 else 'them'} in the class (`tracker` as a property)."
            )

    def start(self) -> None:
        """The service is ready for values. Called once, by ``Accelerator.init_trackers``."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """``values`` are stored as the hyper-parameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """``values`` are logged at ``step``; ``kwargs`` go to the service's own call."""

    def finish(self) -> None:
        """Everything logged has left this process, and the run is closed."""
