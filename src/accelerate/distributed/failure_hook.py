"""The exception hook of a failing rank: add the ranks' current collectives to its traceback.

The first rank that fails collects all ranks' flight records, while the others stay to answer. A launcher soon stops the
other ranks after one has died. The rank then reports the records that have arrived.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ClassVar, final

from ..errors import CollectiveError
from .failures import OWN_COLLECTIVE, is_about_another_rank
from .flight_record import last_collective, own_collectives

#: Collects flight records until the given function returns true (urgent), and returns the report; empty if there is
#: none.
Collect = Callable[[Callable[[], bool]], str]


@final
class FailureHook:
    """This process's `sys.excepthook`, which calls the previous one first.

    Attributes:
        collect: the newest world's function to collect records; None without a hang watch.
    """

    #: Whether an exception ends this process.
    has_failed: ClassVar[bool] = False
    _installed: ClassVar[FailureHook | None] = None

    def __init__(self) -> None:
        self._before = sys.excepthook
        #: Checked before another hook that writes the launcher's file is installed.
        self.records_failures: bool = getattr(self._before, "records_failures", False)
        self.collect: Collect | None = None

    @classmethod
    def install(cls) -> FailureHook:
        """Install the hook once per process, and return it."""
        if cls._installed is None:
            cls._installed = cls()
            sys.excepthook = cls._installed
        return cls._installed

    @classmethod
    def forget(cls, collect: Collect) -> None:
        """Stop using ``collect``, because its world has ended."""
        if cls._installed is not None and cls._installed.collect == collect:
            cls._installed.collect = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the exception, then all ranks' current collectives, as far as known."""
        FailureHook.has_failed = True
        text = _own_collective(error)
        if text and sys.version_info >= (3, 11):
            error.add_note(text)
        # At once: the launcher uses the time of each traceback to find the rank that failed first.
        self._before(kind, error, trace)
        if text and sys.version_info < (3, 11):
            print(text, file=sys.stderr)
        if self.collect is None or not issubclass(kind, Exception):
            return
        sys.stderr.flush()
        # The store may have ended, which the traceback says.
        with _sigterm_put_off() as is_stopped, contextlib.suppress(RuntimeError):
            if found := self.collect(is_stopped):
                print(found, file=sys.stderr, flush=True)


def _own_collective(error: BaseException) -> str:
    """Return this rank's current collective, if another rank's end or absence caused the error."""
    if not isinstance(error, (CollectiveError, RuntimeError)) or not is_about_another_rank(str(error)):
        return ""
    last = last_collective(own_collectives())
    return "" if last is None else f"{OWN_COLLECTIVE}{last}."


@contextlib.contextmanager
def _sigterm_put_off() -> Iterator[Callable[[], bool]]:
    """Delay SIGTERM to the end of this block; yield a function that returns whether it came."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if stopped.is_set():  # else the process would wait for the others as it leaves, until it is killed
            os.kill(os.getpid(), signal.SIGTERM)
