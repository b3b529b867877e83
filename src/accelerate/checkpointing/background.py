"""Saving while the run goes on: one save at a time, whose failure is raised at the next occasion and at the exit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import final
from weakref import WeakSet

from ..errors import CheckpointError
from ..world import release_before_leaving
from .snapshot import HostMemory

_log = logging.getLogger(__name__)


@final
class Background:
    """The save that is being written while the run goes on, if there is one.

    Attributes:
        failure: why the last save was not committed, until it is raised; read by the training loop at each step.
        memory: where snapshots are kept. It is used again by the next save, so that must wait for this one.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, save: Callable[[], object]) -> None:
        """``save()`` runs beside the program; the program doesn't end before it has."""
        assert not self.is_running
        _finish_before_the_world_is_left()
        _living.add(self)
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:  # it belongs to the training loop, which is in another thread
            self.failure = error

    def finish(self) -> None:
        """No save is running any more; one that failed is still to be raised."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process_id == os.getpid():  # a forked child has no such thread
            thread.join()

    def wait(self) -> None:
        """The last save is committed.

        Raises:
            CheckpointError: it failed.
        """
        self.finish()
        self.raise_failure()

    def release_memory(self) -> None:
        """The memory of snapshots is given back, once nothing is written from it any more."""
        self.finish()
        self.memory.release()

    def raise_failure(self) -> None:
        """The last save didn't fail (or is still being written).

        Raises:
            CheckpointError: it failed; raised once.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise CheckpointError(f"a checkpoint that was being saved in the background failed: {failure}") from failure


_living: WeakSet[Background] = WeakSet()
_is_awaited = False


def _finish_before_the_world_is_left() -> None:
    """A save needs the other ranks, so it ends before this one stops being one of them."""
    global _is_awaited
    if not _is_awaited:
        _is_awaited = True
        release_before_leaving(_finish_for_good)


def _finish_for_good() -> None:
    global _is_awaited
    _is_awaited = False
    _finish_all()


def _finish_all() -> list[Exception]:
    """What the saves that were still running at the exit of the program, or their owners never asked about, said."""
    mine = [background for background in _living if background._process_id == os.getpid()]
    for background in mine:
        background.finish()
    return [background.failure for background in mine if background.failure is not None]


@atexit.register  # early in the program, so late at its exit: the world has been left by then
def _fail_the_program() -> None:
    failures = _finish_all()
    for failure in failures:
        _log.error("A checkpoint that was being saved in the background at the end of the program failed: %s", failure)
    if failures:  # a launcher must learn that the last checkpoint is missing; only the status can tell it
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
