"""Choose the trackers of a run from ``log_with``, start them, log to them and finish them."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast
from weakref import WeakSet

from .. import optional
from ..errors import SettingError
from ..settings.labels import LoggerType
from ..settings.option import nearest
from .background_queue import BackgroundQueue
from .base import BlankTracker, GeneralTracker, writes_here
from .jsonl import JSONLTracker
from .mlflow import MLflowTracker
from .services import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

logger: logging.Logger = logging.getLogger(__name__)

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
#: How long to wait for the queued calls before returning the service's own object.
CATCH_UP_SECONDS: Final = 10.0
_remarked: Final[WeakSet[GeneralTracker]] = WeakSet()
_remarked_names: Final[set[str]] = set()
_SERVICES: Final = frozenset(LOGGER_TYPE_TO_CLASS)
# Errors of `start` for a wrong call, as opposed to a service that is down: raise them before training begins.
_MISTAKES: Final = (ImportError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose service is installed."""
    return [LoggerType(name) for name in LOGGER_TYPE_TO_CLASS if name in _SERVICES and _is_available(name)]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make ``tracker_class`` available to ``log_with`` by its ``name``; warn if it replaces another.

    Raises:
        SettingError: the class isn't a `GeneralTracker`, or lacks ``name`` or ``requires_logging_directory``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise SettingError(
            f"`tracker_class` must be a subclass of `GeneralTracker`, but register_tracker_class got {tracker_class!r}."
        )
    name = getattr(tracker_class, "name", None)
    if not (isinstance(name, str) and name):
        raise SettingError(f"{tracker_class.__name__} must define a non-empty `name` attribute to be registered by.")
    if not isinstance(getattr(tracker_class, "requires_logging_directory", None), bool):
        raise SettingError(
            f"{tracker_class.__name__} must define a `requires_logging_directory` class attribute: True if it can't do "
            "without a `logging_dir`, else False."
        )
    before = LOGGER_TYPE_TO_CLASS.get(name)
    if before is not None:
        warnings.warn(
            f"A tracker with the name {name!r} is already registered ({before.__name__}) and will be overwritten by "
            f"{tracker_class.__name__}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(
    log_with: str | LoggerType | GeneralTracker | Iterable[str | LoggerType | GeneralTracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[LoggerType | str | GeneralTracker]:
    """Return the trackers of ``log_with`` that can run here, each once: labels for names, and objects unchanged.

    ``"all"`` selects every installed service. A tracker is dropped if its service isn't installed.

    Raises:
        SettingError: a name is unknown, or a tracker needs a ``logging_dir`` that isn't given.
    """
    if log_with is None:
        return []
    one = isinstance(log_with, (str, GeneralTracker)) or not isinstance(log_with, Iterable)
    asked: list[Any] = [log_with] if one else list(cast("Iterable[Any]", log_with))
    everything = any(each == "all" for each in asked if isinstance(each, str))
    wanted = [each if isinstance(each, GeneralTracker) or each == "all" else _known(each) for each in asked]
    if everything:  # "all" includes the names
        wanted = [each for each in wanted if isinstance(each, GeneralTracker)]
        wanted += [str(label) for label in get_available_trackers()]
    chosen: list[LoggerType | str | GeneralTracker] = []
    for name in wanted:
        if isinstance(name, GeneralTracker):
            chosen.append(name)
            continue
        if name in chosen:
            continue
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
        named = ",".join(str(each) for each in asked)
        remedy = "" if everything else f' Install with: pip install "accelerate[{named}]".'
        warnings.warn(
            f"`log_with={named}` was passed but no supported trackers are currently installed: nothing is sent to a "
            f"service.{remedy}",
            stacklevel=3,
        )
    return chosen


def init_trackers(
    trackers: Iterable[str | LoggerType | GeneralTracker],
    project_name: str,
    config: dict[str, object] | None = None,
    init_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[GeneralTracker]:
    """Start the trackers of a run, and store ``config`` in them.

    Only the main process starts them. A service that fails is replaced by a blank tracker of its name; a mistake in the
    call raises.

    ``trackers`` is the result of `filter_trackers`; ``init_kwargs`` are the constructors' arguments by tracker name.
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
    return [_start(tracker, config) for tracker in started]


def init_run_log(
    project_name: str,
    config: dict[str, object] | None = None,
    init_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[GeneralTracker]:
    """Start the JSONL log of a run, which is written whenever there is a ``logging_dir``.

    The list is empty on other processes than the main one, without a folder, and with
    ``init_kwargs={"jsonl": {"enabled": False}}``.
    """
    is_wanted = (init_kwargs or {}).get(JSONLTracker.name, {}).get("enabled", True)
    if logging_dir is None or not is_wanted or not writes_here():
        return []
    return [_start(JSONLTracker(project_name, os.fspath(logging_dir)), config)]


def _start(tracker: GeneralTracker, config: dict[str, object] | None) -> GeneralTracker:
    """Start the service of ``tracker`` and its background queue; return a blank tracker if the service fails."""
    tracker._background_queue = None  # until `start` has returned, calls are made at once
    try:
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(config)
    except _MISTAKES:
        raise
    except Exception as error:  # a service that is down or rejects the run; training doesn't depend on it
        logger.error(
            "The tracker '%s' could not start (%s: %s). Training continues without it.",
            tracker.name, type(error).__name__, error,
        )  # fmt: skip
        return BlankTracker(tracker.name)
    tracker._background_queue = BackgroundQueue(
        tracker.name, limit_bytes=tracker.queue_limit_bytes, in_background=tracker.logs_in_background
    )
    return tracker


def log(
    trackers: Iterable[GeneralTracker],
    values: Mapping[str, object],
    step: int | None,
    log_kwargs: Mapping[str, Mapping[str, object]],
    *,
    asked: Sequence[object] = (),
) -> None:
    """Queue the current ``values`` for each tracker, after the calls queued before. Never raises.

    ``asked`` are the trackers of ``log_with``, for the message if none was started.
    """
    trackers = list(trackers)
    if asked and not trackers and writes_here():
        _remark_on_missing_start(", ".join(str(getattr(tracker, "name", tracker)) for tracker in asked))
    for tracker in trackers:
        queue = tracker._background_queue
        if queue is not None:
            what = "log" if step is None else f"log at step {step}"
            queue.put(tracker.log, what, values, step=step, **log_kwargs.get(tracker.name, {}))
        elif not isinstance(tracker, BlankTracker) and tracker not in _remarked:
            _remarked.add(tracker)
            logger.warning(
                "The tracker '%s' doesn't run (before init_trackers(), or after end_training()), so what is logged now "
                "is left out.", tracker.name,
            )  # fmt: skip


def _remark_on_missing_start(names: str) -> None:
    if names not in _remarked_names:
        _remarked_names.add(names)
        logger.warning(
            "log() was called before init_trackers(), so %s didn't get the values. Call "
            "accelerator.init_trackers(project_name) before the first log().", names,
        )  # fmt: skip


def finish(trackers: Iterable[GeneralTracker]) -> None:
    """Close all trackers, each within its timeout, and log how many calls were lost."""
    open_ones = [(tracker, tracker._background_queue) for tracker in trackers if tracker._background_queue is not None]
    begun = time.monotonic()
    for tracker, queue in open_ones:  # close all first, so that they finish in parallel
        queue.close(tracker.finish)
    for tracker, queue in open_ones:
        limit = tracker.finish_timeout_seconds
        is_finished = queue.wait_until_closed(begun + limit, limit)
        tracker._background_queue = None
        if is_finished:
            _leave_thread(tracker)


def _leave_thread(tracker: GeneralTracker) -> None:
    try:
        tracker._leave_thread()
    except Exception as error:  # the service's; the code after the run must still be executed
        logger.error("The tracker '%s' failed at its end (%s: %s).", tracker.name, type(error).__name__, error)


def find_tracker(
    trackers: Iterable[GeneralTracker], name: str, unwrap: bool = False, *, run_log: Iterable[GeneralTracker] = ()
) -> Any:
    """Return the tracker with that ``name``; with ``unwrap``, the service's own object.

    The object has received all values logged before, unless that takes longer than :data:`CATCH_UP_SECONDS`. On other
    processes than the main one, and if no tracker runs at all, it is a blank tracker, whose calls do nothing.

    Raises:
        SettingError: there are trackers, but none of that name.
    """
    by_name = {tracker.name: tracker for tracker in trackers}
    found = next((tracker for tracker in (*by_name.values(), *run_log) if tracker.name == str(name)), None)
    if found is not None and unwrap:
        queue = found._background_queue
        if queue is not None and not queue.is_current_thread:
            queue.wait(CATCH_UP_SECONDS)
        return cast(Any, found).tracker
    if found is not None:
        return found
    if not by_name or not writes_here():
        return BlankTracker(str(name))
    raise SettingError(
        f"{name} is not an available tracker stored inside the `Accelerator`. Running: {', '.join(by_name)}. Ask for "
        f"it with `Accelerator(log_with={str(name)!r})` and call `init_trackers` first."
    )


def _known(name: object) -> str:
    if not isinstance(name, str) or str(name) not in LOGGER_TYPE_TO_CLASS:
        near = nearest(str(name), LOGGER_TYPE_TO_CLASS)
        raise SettingError(
            f"Unsupported logging capability: {name} (`log_with`).{f' Did you mean {near}?' if near else ''} Choose "
            f"between {', '.join(['all', *LOGGER_TYPE_TO_CLASS])}, a GeneralTracker object, or register a class with "
            "`accelerate.tracking.register_tracker_class`."
        )
    return str(name)


def _is_available(name: str) -> bool:
    """Return whether the service called ``name`` is installed; a registered class is always available."""
    if name not in _SERVICES:
        return True
    return getattr(optional, f"is_{name}_available")()


def _label(name: str) -> LoggerType | str:
    return LoggerType(name) if name in _SERVICES else name
