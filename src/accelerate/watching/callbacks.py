"""What the user may do at the moments of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..health.throughput import StepReport

if TYPE_CHECKING:
    from .run import RunWatch


class RunCallback:
    """The moments of a run; each does nothing unless a subclass says otherwise.

    Called on every rank. An exception in one ends the run, as anywhere in the loop.
    """

    def on_step(self, run: RunWatch) -> None:
        """An optimizer update is done; ``run.updates`` counts it. Here, reading a tensor waits for the device."""

    def on_report(self, run: RunWatch, report: StepReport) -> None:
        """The numbers of the last updates are known, the same on every rank but for times and memory."""

    def on_epoch(self, run: RunWatch, epoch: int) -> None:
        """A pass over the training loader is done; ``epoch`` counts from 0."""

    def on_save(self, run: RunWatch, folder: str) -> None:
        """``save_state`` has returned; an asynchronous one may still be writing."""

    def on_stop(self, run: RunWatch, reason: str) -> None:
        """All ranks have agreed to stop; `RunStopped` is raised next."""
