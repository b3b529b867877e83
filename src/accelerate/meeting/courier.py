"""Calls that may never return, made by a thread that can be given up.

The client of a store waits without limit for an answer on a connection that has died silently (a pulled cable, a frozen
host), and holds a lock meanwhile. Whoever asks through a courier waits as long as it wants to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

Answer = TypeVar("Answer")


class Silence(RuntimeError):
    """There was no answer in time, and there will be none."""


@final
class Courier:
    """One thread that makes calls in the order in which they are asked for; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._kept: list[Any] = []
        self.is_lost = False  # gave no answer once; everything asked after that fails at once

    def ask(self, call: Callable[[], Answer], seconds: float) -> Answer:
        """What `call()` returned or raised. Raises Silence when it does neither within `seconds`."""
        if self.is_lost:
            raise Silence("no answer")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done = threading.Event()
        answer: list[Any] = []
        errors: list[BaseException] = []

        def errand() -> None:
            try:
                answer.append(call())
            except BaseException as error:  # raised again where it was asked for
                errors.append(error)
            done.set()

        self._errands.put(errand)
        if not done.wait(seconds):
            self.is_lost = True
            raise Silence(f"no answer within {seconds:.0f} s")
        if errors:
            raise errors[0]
        return answer[0]

    def keep(self, *things: object) -> None:
        """Where the courier is lost, `things` live as long as the process.

        What its call holds in C++ can't be freed before the call returns: freeing it would wait for the answer too.
        """
        if self.is_lost:
            self._kept += things  # a thread that never ends keeps what it runs on, even when Python is taken down

    def dismiss(self) -> None:
        """The thread has ended, unless it is lost."""
        if self._thread is not None and not self.is_lost:
            self._errands.put(None)
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()
