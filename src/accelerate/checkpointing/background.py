"""Saving in a background thread: one save at a time, whose failure is raised by the next call and at the exit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import final
from weakref import WeakSet

from ..distributed.world import release_before_leaving
from ..errors import CheckpointError
from .items import HostMemory

_log = logging.getLogger(__name__)


@final
class Background:
    """The save that is being written while the run goes on, if there is one.

    Attributes:
        failure: why the last save was not committed, until it is raised; read by the training loop at each step.
        memory: the memory of snapshots. It is used again by the next save, so that must wait for this one.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.memory: HostMemory = HostMemory()
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, save: Callable[[], object]) -> None:
        """Run ``save()`` in a thread that the program waits for before it exits."""
        assert not self.is_running
        _finish_before_world_exit()
        _instances.add(self)
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:  # it belongs to the training loop, which is in another thread
            self.failure = error

    def finish(self) -> None:
        """Wait for the running save; the error of one that failed stays to be raised."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process_id == os.getpid():  # a forked child has no such thread
            thread.join()

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CheckpointError: it failed.
        """
        self.finish()
        self.raise_failure()

    def release_memory(self) -> None:
        """Free the memory of snapshots, after waiting for the save that writes from it."""
        self.finish()
        self.memory.release()

    def raise_failure(self) -> None:
        """Raise the error of the last save if it failed (not of one that is still being written).

        Raises:
            CheckpointError: it failed; raised once.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise CheckpointError(f"a checkpoint that was being saved in the background failed: {failure}") from failure


_instances: WeakSet[Background] = WeakSet()
_is_registered = False


def _finish_before_world_exit() -> None:
    """Have running saves finished before the process group is destroyed: they need the other ranks."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        release_before_leaving(_finish_at_world_exit)


def _finish_at_world_exit() -> None:
    global _is_registered
    _is_registered = False
    _finish_all()


def _finish_all() -> list[Exception]:
    """Wait for all running saves, and return the errors of those saves that nobody has asked about."""
    mine = [background for background in _instances if background._process_id == os.getpid()]
    for background in mine:
        background.finish()
    return [background.failure for background in mine if background.failure is not None]


@atexit.register  # early in the program, so late at its exit: the world has been left by then
def _fail_the_program() -> None:
    failures = _finish_all()
    for failure in failures:
        _log.error("A checkpoint that was being saved in the background at the end of the program failed: %s", failure)
    if failures:  # only the exit status shows a launcher that the last checkpoint is missing
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
