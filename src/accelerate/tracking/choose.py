"""Which trackers a run has: the table of names, what ``log_with`` means, and the trackers started."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from .. import optional
from ..errors import SettingError
from ..settings.labels import LoggerType
from .aim import AimTracker
from .base import BlankTracker, GeneralTracker, writes_here
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .jsonl import JSONLTracker
from .mlflow import MLflowTracker
from .outbox import Outbox
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandBTracker

logger = logging.getLogger(__name__)

#: Name -> class, for every tracker that ``log_with`` takes by name; `register_tracker_class` adds to it.
LOGGER_TYPE_TO_CLASS: Final[dict[str, type[GeneralTracker]]] = {
    tracker_class.name: tracker_class
    for tracker_class in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
}
_SERVICES: Final = frozenset(LOGGER_TYPE_TO_CLASS)
# What `start` raises because the call is wrong, not because the service is down: better learnt before training begins.
_MISTAKES: Final = (ImportError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)


def get_available_trackers() -> list[LoggerType | str]:
    """The built-in trackers whose service is installed here, and the registered ones."""
    return [_label(name) for name in LOGGER_TYPE_TO_CLASS if _is_available(name)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """``log_with`` takes ``tracker_class`` by its ``name`` from now on; replacing one warns.

    Raises:
        SettingError: the class isn't a `GeneralTracker`, or has no ``name``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise SettingError(f"`register_tracker_class` takes a subclass of GeneralTracker, not {tracker_class!r}.")
    name = getattr(tracker_class, "name", None)
    if not (isinstance(name, str) and name):
        raise SettingError(f"{tracker_class.__name__} has no `name` to register it by; give the class one.")
    before = LOGGER_TYPE_TO_CLASS.get(name)
    if before is not None and before is not tracker_class:
        logger.warning("The tracker name %r meant %s; it means %s now.", name, before.__name__, tracker_class.__name__)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Iterable[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[LoggerType | str | GeneralTracker]:
    """The trackers of ``log_with`` that can run here, each once: names as labels, objects as they are.

    ``"all"`` means every one that is installed. One whose service isn't installed is dropped.

    Raises:
        SettingError: a name is unknown, or a tracker needs a ``logging_dir`` that isn't given.
    """
    if log_with is None:
        return []
    asked = [log_with] if isinstance(log_with, (str, GeneralTracker)) else list(log_with)
    everything = "all" in [str(each) for each in asked if isinstance(each, str)]
    objects = [each for each in asked if isinstance(each, GeneralTracker)]
    names = [_known(each) for each in asked if not isinstance(each, GeneralTracker) and each != "all"]
    if everything:
        names = [str(label) for label in get_available_trackers()]
    chosen: list[LoggerType | str | GeneralTracker] = list(objects)
    for name in dict.fromkeys(names):
        if not _is_available(name):
            logger.debug("The tracker %r was asked for, but its package isn't installed; it is left out.", name)
            continue
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
            if everything:
                continue
            raise SettingError(
                f"log_with={name!r} needs a folder to write to. Give the Accelerator a `project_dir`, or a "
                "`project_config` with a `logging_dir`."
            )
        chosen.append(_label(name))
    if asked and not chosen and writes_here():
        logger.warning(
            "log_with=%s was asked for, but no such tracker is installed here; nothing is sent to a service.",
            ", ".join(str(each) for each in asked),
        )
    return chosen


def init_trackers(
    trackers: Iterable[str | LoggerType | GeneralTracker],
    project_name: str,
    config: dict[str, Any] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[GeneralTracker]:
    """The trackers of a run, started, with ``config`` stored; the JSONL log of the run comes last.

    Off the main process there are none. A service that can't be had is replaced by a blank tracker of its name; a
    mistake in the call raises.

    ``trackers`` is what `filter_trackers` returned; ``init_kwargs`` holds the constructor's arguments by
    tracker name. The JSONL log is there whenever ``logging_dir`` is; ``init_kwargs={"jsonl": {"enabled":
    False}}`` leaves it out.
    """
    if not writes_here():
        return []
    init_kwargs = init_kwargs or {}
    started: list[GeneralTracker] = []
    for each in trackers:
        if isinstance(each, GeneralTracker):
            started.append(each)
            continue
        tracker_class: Callable[..., GeneralTracker] = LOGGER_TYPE_TO_CLASS[str(each)]
        arguments: tuple[Any, ...] = (project_name,)
        if LOGGER_TYPE_TO_CLASS[str(each)].requires_logging_directory:
            arguments = (project_name, logging_dir)
        started.append(tracker_class(*arguments, **init_kwargs.get(str(each), {})))
    if logging_dir is not None and init_kwargs.get(JSONLTracker.name, {}).get("enabled", True):
        started.append(JSONLTracker(project_name, os.fspath(logging_dir)))
    return [_started(tracker, config) for tracker in started]


def _started(tracker: GeneralTracker, config: dict[str, Any] | None) -> GeneralTracker:
    """The tracker with its service ready and its own thread, or a blank one where the service can't be had."""
    tracker._outbox = None  # until `start` has returned, calls are made at once
    try:
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
    except _MISTAKES:
        raise
    except Exception as error:  # a service that is down or refuses us; a run doesn't depend on it
        logger.error(
            "The tracker '%s' could not start (%s: %s). Training goes on without it.",
            tracker.name, type(error).__name__, error,
        )  # fmt: skip
        return BlankTracker(tracker.name)
    tracker._outbox = Outbox(
        tracker.name, limit_bytes=tracker.queue_limit_bytes, in_background=tracker.logs_in_background
    )
    return tracker


def log(
    trackers: Iterable[GeneralTracker],
    values: dict[str, Any],
    step: int | None,
    log_kwargs: Mapping[str, Mapping[str, Any]],
) -> None:
    """Each tracker will be told ``values`` as they are now, after what it was told before. Never raises."""
    for tracker in trackers:
        outbox = tracker._outbox
        if outbox is not None:
            what = "log" if step is None else f"log at step {step}"
            outbox.put(tracker.log, what, values, step=step, **log_kwargs.get(tracker.name, {}))


def finish(trackers: Iterable[GeneralTracker]) -> None:
    """Each tracker was told everything and has finished, or its time was over; what was lost has been said."""
    open_ones = [(tracker, tracker._outbox) for tracker in trackers if tracker._outbox is not None]
    begun = time.monotonic()
    for tracker, outbox in open_ones:  # all at once: they wait beside each other
        outbox.close(tracker.finish)
    for tracker, outbox in open_ones:
        limit = tracker.finish_timeout_seconds
        is_finished = outbox.wait_for_the_end(begun + limit, limit)
        tracker._outbox = None
        if is_finished:
            _leave_thread(tracker)


def _leave_thread(tracker: GeneralTracker) -> None:
    try:
        tracker._leave_thread()
    except Exception as error:  # the service's; the run is over, and what follows it must still happen
        logger.error("The tracker '%s' failed at its end (%s: %s).", tracker.name, type(error).__name__, error)


def find_tracker(trackers: Iterable[GeneralTracker], name: str, unwrap: bool = False) -> Any:
    """The tracker with that ``name``; with ``unwrap``, the service's own object.

    Off the main process it is a blank one, on which every call does nothing.

    Raises:
        SettingError: on the main process, none has that name.
    """
    by_name = {tracker.name: tracker for tracker in trackers}
    found = by_name.get(str(name))
    if found is not None:
        return cast(Any, found).tracker if unwrap else found
    if not writes_here():
        return BlankTracker(str(name))
    raise SettingError(
        f"No tracker {name!r} is running. Running: {', '.join(by_name) or 'none'}. Ask for it with "
        f"`Accelerator(log_with={name!r})` and call `init_trackers` first."
    )


def _known(name: object) -> str:
    if not isinstance(name, str) or str(name) not in LOGGER_TYPE_TO_CLASS:
        raise SettingError(
            f"The tracker {name!r} in `log_with` is unknown. Use {', '.join(['all', *LOGGER_TYPE_TO_CLASS])}, "
            "a GeneralTracker object, or register a class with `accelerate.tracking.register_tracker_class`."
        )
    return str(name)


def _is_available(name: str) -> bool:
    """Whether the service behind a name is installed; a registered class answers for itself."""
    if name not in _SERVICES:
        return True
    return getattr(optional, f"is_{name}_available")()


def _label(name: str) -> LoggerType | str:
    return LoggerType(name) if name in _SERVICES else name
