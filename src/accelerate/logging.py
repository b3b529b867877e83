"""Process-aware loggers: they log once, on every rank, or on each rank in turn."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, final

from .distributed.process_control import in_order
from .distributed.world import current_world
from .errors import WorldError
from .optional import require
from .settings import env

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

# The warnings that `warning_once` has logged: the logger's name and the arguments, as text.
_logged_once: set[tuple[str, str]] = set()


@final
class MultiProcessAdapter(_Adapter):
    """A logger whose lines begin with ``[RANK n]`` and, by default, come from the main process only.

    Every logging call takes two additional keywords:

    - ``main_process_only=True``: False logs on every process.
    - ``in_order=False``: True logs on every process, one after the other. Then every process must make the call.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log ``msg`` if this process's rank and the two keywords say so.

        Raises:
            WorldError: neither a ``PartialState`` nor an ``Accelerator`` exists yet.
        """
        world = current_world()
        if world is None:
            raise WorldError(
                "A logger of `accelerate.logging` was used before it is known which process this is. Make an "
                "`Accelerator()` or a `PartialState()` first, or use Python's `logging.getLogger` up to then."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        ordered = kwargs.pop("in_order", False)
        # The caller's file and line: one frame up from here (frames inside `logging` are not counted).
        kwargs.setdefault("stacklevel", 2)
        with in_order(world) if ordered else nullcontext():
            # The level is checked inside: ranks may have different levels, and all of them must take part.
            if (ordered or world.is_main or not main_process_only) and self.isEnabledFor(level):
                message, options = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **options)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Return the message with the rank in front."""
        world = current_world()
        return (str(msg) if world is None else f"[RANK {world.rank}] {msg}"), kwargs

    def warning_once(self, *args: object, **kwargs: Any) -> None:
        """Log a warning at the first call with these arguments in this process, and never again."""
        key = (self.logger.name, repr((args, sorted(kwargs.items()))))
        if key in _logged_once:
            return
        _logged_once.add(key)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
        self.log(logging.WARNING, *args, **kwargs)  # pyright: ignore[reportArgumentType]


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the process-aware logger ``name`` with ``log_level`` (default: ``ACCELERATE_LOG_LEVEL``)."""
    level = log_level if log_level is not None else env.read("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level:
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def install_rich_tracebacks() -> None:
    """Show this process's tracebacks with ``rich`` if ``ACCELERATE_ENABLE_RICH`` is set.

    Raises:
        MissingDependency: it is set, and ``rich`` isn't installed.
    """
    if env.flag("ACCELERATE_ENABLE_RICH"):
        require("rich.traceback", "rich", purpose="ACCELERATE_ENABLE_RICH").install(show_locals=False)
