"""What a tracker has still to be told: calls made one after another on a thread of its own, so that nobody waits.

The thread belongs to one tracker. One that fails or hangs holds up neither the training loop nor another tracker.
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

logger = logging.getLogger(__name__)

#: What one waiting call costs beside its tensors and arrays: the limit holds for scalars too.
BYTES_PER_CALL: Final = 1024
#: How long the exit of a program that never called `end_training` waits for what is still to be told.
EXIT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class _Letter:
    call: Callable[[], object]
    what: str
    size: int
    when: float


@final
class Outbox:
    """The calls that a tracker has still to take, in the order in which they were put here.

    A call that fails is left out, and so is one that would make those that wait larger than ``limit_bytes``. Both are
    said when it happens first, and counted at the end.

    Args:
        owner: what messages call the tracker.
        limit_bytes: how much may wait: the tensors and arrays of the calls, and 1 KiB for each call.
        in_background: without it, each call is made at once, by the caller's thread; only failures are taken care of.
    """

    def __init__(self, owner: str, *, limit_bytes: int, in_background: bool = True) -> None:
        self.owner = owner
        self.limit_bytes = limit_bytes
        self.in_background = in_background
        self.taken = self.failed = self.refused = 0
        self.is_finished = False
        self._changed = threading.Condition()
        self._waiting: deque[_Letter] = deque()
        self._in_hand: _Letter | None = None
        self._bytes = 0
        self._is_closed = False
        self._first_failure = ""
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on this outbox's thread."""
        return self._thread is threading.current_thread()

    @property
    def when(self) -> float:
        """When the call that is being made now was put here, in seconds since 1970; the present, where none is."""
        letter = self._in_hand
        return time.time() if letter is None else letter.when

    @property
    def is_alone(self) -> bool:
        """Whether nothing waits and nothing is being told."""
        return not self._waiting and self._in_hand is None

    def put(self, function: Callable[..., object], what: str, *args: Any, **kwargs: Any) -> None:
        """``function`` will be called with copies of the arguments, after everything that was put here before.

        What was put here after the end is left out, and so is what a forked child puts here.
        """
        if os.getpid() != self._process_id:
            return
        try:
            size = Size(BYTES_PER_CALL)
            args, kwargs = copied(args, size), copied(kwargs, size)
        except Exception as error:  # a value that can't be copied costs a record, not the run
            self._note_failure(what, error)
            return
        letter = _Letter(lambda: function(*args, **kwargs), what, size.bytes, time.time())
        if not self.in_background:
            self._deliver(letter)
            return
        with self._changed:
            if self._is_closed:
                return
            # One that is larger than the limit by itself is let in when it is alone.
            fits = self._bytes + letter.size <= self.limit_bytes or self.is_alone
            if fits:
                self._append(letter)
            else:
                self.refused += 1
        if not fits and self.refused == 1:
            logger.warning(
                "The tracker '%s' takes records more slowly than they come: %.0f MiB wait, which is the limit, so new "
                "ones are left out until there is room (first: %s). Training goes on.",
                self.owner, self.limit_bytes / 2**20, what,
            )  # fmt: skip

    def _append(self, letter: _Letter) -> None:
        self._waiting.append(letter)
        self._bytes += letter.size
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tracker {self.owner}", daemon=True)
            self._thread.start()
            # Registered after the service's own handlers were, so called before them.
            atexit.register(self.wait, EXIT_SECONDS)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                letter = self._in_hand = self._waiting.popleft()
            self._deliver(letter)
            with self._changed:
                self._in_hand = None
                self._bytes -= letter.size
                self._changed.notify_all()

    def _deliver(self, letter: _Letter) -> None:
        try:
            letter.call()
        except KeyboardInterrupt:  # the person's, where the call is made by the training loop itself
            raise
        except BaseException as error:  # the service's (some exit the program); training doesn't depend on it
            self._note_failure(letter.what, error)
        else:
            self.taken += 1

    def _note_failure(self, what: str, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            self._first_failure = f"{what}: {type(error).__name__}: {error}"
            logger.error(
                "The tracker '%s' failed (%s). Training goes on, and what it can't take is left out.",
                self.owner, self._first_failure,
            )  # fmt: skip

    def wait(self, timeout_seconds: float) -> bool:
        """Whether everything has been told, after at most ``timeout_seconds``."""
        if os.getpid() != self._process_id:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.is_alone, timeout_seconds)

    def close(self, finish: Callable[[], object]) -> None:
        """Nothing more is taken; ``finish`` is the last call."""
        if os.getpid() != self._process_id:
            return

        def last() -> None:
            finish()
            self.is_finished = True

        letter = _Letter(last, "finish", 0, time.time())
        if not self.in_background:
            self._is_closed = True
            self._deliver(letter)
            return
        with self._changed:
            if not self._is_closed:
                self._append(letter)
                self._is_closed = True

    def wait_for_the_end(self, deadline: float, timeout_seconds: float) -> bool:
        """Whether ``finish`` returned before ``deadline``; if not, what waits is dropped. Losses are said."""
        ended = self.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = 0 if ended else len(self._waiting) + (self._in_hand is not None)
            self._waiting.clear()
        atexit.unregister(self.wait)
        if self.failed or self.refused or left:
            logger.warning("%s", self._account(left, timeout_seconds))
        return self.is_finished

    def _account(self, left: int, timeout_seconds: float) -> str:
        losses: list[str] = []
        if self.failed:
            losses.append(f"{self.failed} failed (first: {self._first_failure})")
        if self.refused:
            losses.append(f"{self.refused} found no room")
        if left:
            losses.append(f"{left} were not told within the {timeout_seconds:g} s that the end of training waits")
        total = self.taken + self.failed + self.refused + left
        return f"The tracker '{self.owner}' left out calls: of {total}, {', '.join(losses)}."


@final
class Size:
    """A sum of bytes."""

    def __init__(self, start: int) -> None:
        self.bytes = start


def copied(value: Any, size: Size) -> Any:
    """``value`` as it is now, also if its tensors, arrays, lists and dicts change later; ``size`` counts its bytes.

    Tensors are copied to host memory. Other objects (figures, images) are kept as they are.
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
