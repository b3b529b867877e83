"""Stop of a loop at a step that all ranks agreed on, when one of them got a notice that its machine is taken away.

The points at which a loop may stop lie between two batches, where the update of the last batch is done, the learning
rate too, and the next batch isn't read. Passing one costs a few additions: nothing is asked but this process's memory.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakSet

from ..distributed.failures import RECORDS_VARIABLE, record_saved
from ..distributed.notices import Notices
from ..distributed.preemption import StopAgreement
from ..distributed.world import World, release_before_leaving
from ..settings import env

if TYPE_CHECKING:
    from ..distributed.preemption import Point
    from ..plugins.handlers import ProjectConfiguration
    from ..plugins.preemption import PreemptionPolicy
    from ..settings.tree import Settings
    from .accumulation import GradientState


class SavedRun(Protocol):
    """The parts of an Accelerator that a preemption needs."""

    settings: Settings
    world: World
    gradient_state: GradientState
    project_configuration: ProjectConfiguration

    def save_state(self, *, asynchronous: bool | None, details: Mapping[str, object] | None) -> str:
        """Save everything as one checkpoint, by all ranks, and return its folder."""
        ...


@final
class Preemption:
    """The points of one Accelerator's loop, and the end of the loop at the one that all ranks agree on."""

    def __init__(self, policy: PreemptionPolicy, run: SavedRun) -> None:
        self._policy, self._run, self._gradient_state = policy, run, run.gradient_state
        self._world = world = run.world
        is_first = world.is_local_main  # the host's other ranks hear of it by this one
        file, url = (policy.notice_file, policy.notice_url) if is_first else (None, None)
        self._notices = Notices(policy.signals, file, url)
        self._agreement = StopAgreement(self._notices, world.coordinator, policy.grace_seconds)
        self._backwards = self._batches = 0
        self._training_loaders: WeakSet[Any] = WeakSet()
        self._newest: weakref.ref[Any] | None = None  # the loader whose loop has passed the last point
        self.is_over: bool = False  # all ranks came to the agreed point

    def start(self) -> None:
        """Listen for notices until the world is left, and stop at the points of the prepared loaders' loops."""
        self._notices.start()
        self._agreement.start()
        release_before_leaving(self._agreement.stop)
        if self._policy.save_on_signal:
            self._gradient_state.between_batches = self.between_batches

    # -- points --------------------------------------------------------------------------------------------

    def between_batches(self, loader: Any, begins: bool = False) -> None:
        """Pass a point: before the first batch of a pass over ``loader``, between two of them, or where none is read.

        Raises:
            SystemExit: the run ends here, on all ranks.
        """
        backwards = self._gradient_state.num_backwards
        has_trained = backwards != self._backwards
        if has_trained:
            self._backwards, self._batches = backwards, 0
            if self._newest is not None and (newest := self._newest()) is not None:
                self._training_loaders.add(newest)
        else:
            self._batches += 1
        if self._newest is None or self._newest() is not loader:
            self._newest = weakref.ref(loader)
        self._agreement.passed = point = (backwards, self._batches)
        if self._agreement.is_asked:
            self._stop_if_agreed(point, loader, begins, has_trained)

    def check(self) -> bool:
        """Return whether the run is to end: for scripts that end it themselves, with a point at each call."""
        if self._policy.save_on_signal or self.is_over:
            return self.is_over
        backwards = self._gradient_state.num_backwards
        self._batches = self._batches + 1 if backwards == self._backwards else 0
        self._backwards = backwards
        self._agreement.passed = point = (backwards, self._batches)
        if self._agreement.is_asked:
            self.is_over = self._are_all_at(point)
            if self.is_over:
                self._tell_launcher()
        return self.is_over

    # -- the end -------------------------------------------------------------------------------------------

    def _are_all_at(self, point: Point) -> bool:
        agreed = self._agreement.wait_for_decision(point)
        if agreed is None or point <= agreed.point:
            return False
        backwards, batches = point
        return self._agreement.meet(agreed, f"{batches} batches after {backwards} backward passes")

    def _stop_if_agreed(self, point: Point, loader: Any, begins: bool, has_trained: bool) -> None:
        """Save and end the process, if this is the agreed point. Others than these are only waited at.

        A pass begins at one if it is known to train: before the first batch of an evaluation, random streams are where
        no resumed run comes by.
        """
        is_training = loader in self._training_loaders if begins else has_trained
        leaves_evaluation = not (begins or self._policy.finish_evaluation or getattr(loader, "is_interleaved", False))
        is_possible = self._gradient_state.sync_gradients and (is_training or leaves_evaluation)
        if threading.current_thread() is not threading.main_thread():
            return  # reads ahead of the loop
        if not is_possible:
            self._agreement.wait_for_decision(point)
            return
        if not self._are_all_at(point):
            return
        self.is_over = True
        if not is_training and loader is not self._gradient_state:
            loader.progress.finish(loader.progress.epoch)  # the next evaluation shall be a whole one
        self._save_and_exit()

    def _save_and_exit(self) -> None:
        notice, code = self._agreement.notice, self._policy.exit_code
        self._run.project_configuration.automatic_checkpoint_naming = True  # where `resume()` looks
        folder = self._run.save_state(asynchronous=False, details={"preempted": str(notice)})
        if self._world.is_main:
            print(
                f"accelerate: preempted by {notice}. All {self._world.size} rank(s) saved {folder} after "
                f"{self._backwards} backward passes of this process, and end with exit code {code}.",
                file=sys.stderr,
            )
        self._notices.ignore()
        self._tell_launcher()
        raise SystemExit(code)

    def _tell_launcher(self) -> None:
        record_saved(env.read(RECORDS_VARIABLE), self._world.rank)
