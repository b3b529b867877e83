"""Preemption notices to this process: by a signal, a new file, or a cloud's URL.

A signal is noticed even while the main thread is inside a collective: Python immediately writes to its wake-up file
descriptor, and another thread reads that.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import select
import signal
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, final

from ...distributed.flight_record import FailureHook

_FILE_SECONDS: Final = 0.5
_SIGNAL_SECONDS: Final = 60.0
_URL_SECONDS: Final = 5.0
_URL_TIMEOUT_SECONDS: Final = 2.0
#: How long a forked child waits for its parent to say that the signal went to it too.
_PARENT_SECONDS: Final = 0.5
_FROM_URL: Final = 255
_NO_NOTICES: Final = ("", "none", "false")

Handler = signal.Handlers | Callable[[int, FrameType | None], object] | int | None


@final
class Notices:
    """The notices to this process, from :meth:`start` to :meth:`stop`.

    Args:
        signals: names of signals; those that this system doesn't have are ignored.
        file: a file whose creation or change is a notice.
        url: a URL whose response may be a notice.
    """

    def __init__(self, signals: Sequence[str], file: str | None = None, url: str | None = None) -> None:
        self._numbers = [int(getattr(signal, name)) for name in signals if hasattr(signal, name)]
        self._file, self._url = file, url
        self._file_before = self._file_time()
        self._file_at = 0.0
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        self._before: dict[int, Handler] = {}
        self._wakeup_before = -1
        self._is_noticed = mmap.mmap(-1, 1)  # shared with forked children
        self._stopped = threading.Event()
        self._is_ending = False

    def start(self) -> bool:
        """Start to listen; return whether signals are included, which only the main thread can install."""
        if self._url is not None:
            threading.Thread(target=self._ask_url, name="accelerate notices", daemon=True).start()
        if threading.current_thread() is not threading.main_thread() or not hasattr(os, "register_at_fork"):
            return False
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handle)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        atexit.register(self._note_end)
        reference: weakref.ref[Notices] = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))
        return True

    def stop(self) -> None:
        """Restore the former signal handlers, unless the program is ending: then a signal isn't a failure."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"\0")  # wakes the thread in `take`
        if self._is_ending or threading.current_thread() is not threading.main_thread():
            return
        atexit.unregister(self._note_end)
        self._restore()

    def ignore(self) -> None:
        """Ignore the signals until the process has ended, even while the interpreter shuts down.

        A scheduler may send more of them, and so may srun when the first rank has ended.
        """
        self._is_ending = True
        self.settle()
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Close the file descriptors when no thread listens any more."""
        if not self._before:
            os.close(self._read_end)
            os.close(self._write_end)

    def take(self, seconds: float | None = None) -> str | None:
        """Return the next notice, after waiting up to ``seconds`` for it; None if there is none.

        Without ``seconds``, wait until a signal arrives, the file has to be checked, or :meth:`stop` is called.
        """
        if seconds is None:
            seconds = _SIGNAL_SECONDS if self._file is None else _FILE_SECONDS
        ready, _, _ = select.select([self._read_end], [], [], seconds)
        found: str | None = None
        for number in os.read(self._read_end, 256) if ready else b"":
            if number == _FROM_URL:
                found = f"the notice at {self._url}"
            elif number in self._numbers:
                found = signal.Signals(number).name
            self._forward(number)
        if found is None and self._has_file_changed():
            found = f"the file {self._file}"
        if found is not None:
            self._is_noticed[0] = 1
        return found

    def settle(self) -> None:
        """Mark the notice as answered: signals end forked children again, such as that of ``terminate()``."""
        self._is_noticed[0] = 0

    def _note_end(self) -> None:
        """Prepare for the interpreter's exit: Python's handlers end before it, and the signals would kill it.

        If an exception ends this process, signals end it now; see `_handle`.
        """
        if not FailureHook.has_failed:
            self.ignore()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Report the signal once more, because other code, such as asyncio, may have replaced the wake-up descriptor.

        If an exception already ends this process, the signal ends it now, because nothing would be saved.
        """
        if FailureHook.has_failed:
            self._restore()
            os.kill(os.getpid(), number)
            return
        with contextlib.suppress(OSError):
            os.write(self._write_end, bytes([number]))

    def _forward(self, number: int) -> None:
        if self._wakeup_before >= 0 and number != _FROM_URL:
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, bytes([number]))

    def _file_time(self) -> float | None:
        if self._file is None:
            return None
        try:
            return os.stat(self._file).st_mtime
        except OSError:
            return None

    def _has_file_changed(self) -> bool:
        if self._file is None or time.monotonic() < self._file_at:
            return False
        self._file_at = time.monotonic() + _FILE_SECONDS
        now = self._file_time()
        if now == self._file_before:
            return False
        self._file_before = now
        return now is not None

    def _ask_url(self) -> None:
        assert self._url is not None
        request = urllib.request.Request(self._url, headers={"Metadata-Flavor": "Google", "Metadata": "true"})
        while not self._stopped.wait(_URL_SECONDS):
            try:
                with urllib.request.urlopen(request, timeout=_URL_TIMEOUT_SECONDS) as answer:
                    text = answer.read(1000).decode(errors="replace").strip().lower()
            except (OSError, ValueError):  # not found: there is no notice
                continue
            if text not in _NO_NOTICES:
                with contextlib.suppress(OSError):
                    os.write(self._write_end, bytes([_FROM_URL]))
                return

    # -- forked children, such as the workers of a data loader --------------------------------------------

    def forget(self) -> None:
        """In a forked child, leave the notices to the parent; a signal to both doesn't end the child.

        A scheduler may send a signal to all processes of a job, but loader workers are needed until the agreed step.
        """
        if not self._before:
            return
        with contextlib.suppress(ValueError):  # forked by another thread than the main one
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, self._handle_in_child)

    def _handle_in_child(self, number: int, _frame: FrameType | None) -> None:
        until = time.monotonic() + _PARENT_SECONDS
        while time.monotonic() < until:
            if self._is_noticed[0]:
                return
            time.sleep(0.01)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        if self._before and (current := signal.set_wakeup_fd(self._wakeup_before)) != self._write_end:
            signal.set_wakeup_fd(current)  # other code has set it since
        self._before = {}


def _forget(reference: weakref.ref[Notices]) -> None:
    if (notices := reference()) is not None:
        notices.forget()
