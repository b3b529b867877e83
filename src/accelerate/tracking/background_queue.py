"""A queue of calls to a tracking service, run in order on its own thread, so that training doesn't wait.

Each tracker has its own thread, so a failing or hanging one delays neither the training loop nor other trackers.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch

logger: logging.Logger = logging.getLogger(__name__)

#: The size of a queued call without its tensors and arrays, so that the limit applies to scalars too.
BYTES_PER_CALL: Final = 1024
#: How long a program that never called `end_training` waits at exit for queued calls.
EXIT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class _Item:
    call: Callable[[], object]
    what: str
    size: int
    when: float


@final
class BackgroundQueue:
    """A queue of a tracker's calls, run in order by its own thread.

    Calls that fail are dropped, and so are calls that exceed ``limit_bytes``. The first of each kind is logged
    immediately, and their number at the end.

    Args:
        owner: the tracker's name in log lines.
        limit_bytes: the maximum size of the queue: the tensors and arrays of all calls, plus 1 KiB for each call.
        in_background: use the queue's thread; otherwise the caller's thread runs each call immediately. Failures are
            caught in both cases.
    """

    def __init__(self, owner: str, *, limit_bytes: int, in_background: bool = True) -> None:
        self.owner = owner
        self.limit_bytes = limit_bytes
        self.in_background = in_background
        self.completed: int = 0
        self.failed: int = 0
        self.refused: int = 0
        self.is_finished = False
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._current: _Item | None = None
        self._bytes = 0
        self._is_closed = False
        self._first_failure = ""
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on this queue's thread."""
        return self._thread is threading.current_thread()

    @property
    def when(self) -> float:
        """The time at which the running call was queued, in seconds since 1970; the current time if no call runs."""
        item = self._current
        return time.time() if item is None else item.when

    @property
    def is_idle(self) -> bool:
        """Whether no call is queued or running."""
        return not self._waiting and self._current is None

    def put(self, function: Callable[..., object], what: str, *args: object, **kwargs: object) -> None:
        """Queue a call of ``function`` with copies of the arguments.

        Calls after :meth:`close`, or from a forked child, are dropped.
        """
        if os.getpid() != self._process_id:
            return
        try:
            size = Size(BYTES_PER_CALL)
            args, kwargs = copied(args, size), copied(kwargs, size)
        except Exception as error:  # drop a value that can't be copied; the run goes on
            self._note_failure(what, error)
            return
        item = _Item(lambda: function(*args, **kwargs), what, size.bytes, time.time())
        if not self.in_background:
            self._deliver(item)
            return
        with self._changed:
            if self._is_closed:
                return
            # A call that is larger than the limit by itself is accepted while the queue is idle.
            fits = self._bytes + item.size <= self.limit_bytes or self.is_idle
            if fits:
                self._append(item)
            else:
                self.refused += 1
        if not fits and self.refused == 1:
            logger.warning(
                "The tracker '%s' takes records more slowly than they come: %.0f MiB wait (the limit), so new "
                "ones are dropped until there is room (first: %s). Training continues.",
                self.owner, self.limit_bytes / 2**20, what,
            )  # fmt: skip

    def _append(self, item: _Item) -> None:
        self._waiting.append(item)
        self._bytes += item.size
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.owner}", daemon=True)
            self._thread.start()
            # Registered after the service's own handlers, so called before them.
            atexit.register(self.wait, EXIT_SECONDS)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                item = self._current = self._waiting.popleft()
            self._deliver(item)
            with self._changed:
                self._current = None
                self._bytes -= item.size
                self._changed.notify_all()

    def _deliver(self, item: _Item) -> None:
        try:
            item.call()
        except KeyboardInterrupt:  # Ctrl-C while the training loop itself makes the call
            raise
        except BaseException as error:  # the service's (some exit the program); training doesn't depend on it
            self._note_failure(item.what, error)
        else:
            self.completed += 1

    def _note_failure(self, what: str, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            self._first_failure = f"{what}: {type(error).__name__}: {error}"
            logger.error(
                "The tracker '%s' failed (%s). Training continues; records it can't take are dropped.",
                self.owner, self._first_failure,
            )  # fmt: skip

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the queue is empty, at most ``timeout_seconds``; return whether it is empty."""
        if os.getpid() != self._process_id:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_seconds)

    def close(self, finish: Callable[[], object]) -> None:
        """Refuse further calls, and queue ``finish`` as the last one."""
        if os.getpid() != self._process_id:
            return

        def last() -> None:
            finish()
            self.is_finished = True

        item = _Item(last, "finish", 0, time.time())
        if not self.in_background:
            self._is_closed = True
            self._deliver(item)
            return
        with self._changed:
            if not self._is_closed:
                self._append(item)
                self._is_closed = True

    def wait_until_closed(self, deadline: float, timeout_seconds: float) -> bool:
        """Wait for ``finish`` until ``deadline``, drop and log the remaining calls, and return whether it finished."""
        ended = self.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = 0 if ended else len(self._waiting) + (self._current is not None)
            self._waiting.clear()
        atexit.unregister(self.wait)
        if self.failed or self.refused or left:
            logger.warning("%s", self._losses(left, timeout_seconds))
        return self.is_finished

    def _losses(self, left: int, timeout_seconds: float) -> str:
        losses: list[str] = []
        if self.failed:
            losses.append(f"{self.failed} failed (first: {self._first_failure})")
        if self.refused:
            losses.append(f"{self.refused} found no room")
        if left:
            losses.append(f"{left} were not told within the {timeout_seconds:g} s that the end of training waits")
        total = self.completed + self.failed + self.refused + left
        return f"The tracker '{self.owner}' left out calls: of {total}, {', '.join(losses)}."


@final
class Size:
    """A running sum of bytes."""

    def __init__(self, start: int) -> None:
        self.bytes = start


def copied(value: Any, size: Size) -> Any:
    """Return a copy of the tensors, arrays, lists and dicts in ``value``, and add its bytes to ``size``.

    Tensors are copied to host memory. Other objects (figures, images) aren't copied.
    """
    if isinstance(value, torch.Tensor):
        copy = value.detach().to("cpu", copy=True)
        size.bytes += copy.nbytes
        return copy
    if isinstance(value, np.ndarray):
        size.bytes += value.nbytes
        return value.copy()
    if type(value) is dict:
        return {key: copied(each, size) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each, size) for each in value)
    if isinstance(value, (str, bytes)):
        size.bytes += len(value)
    return value
