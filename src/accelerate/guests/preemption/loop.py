"""Stop a loop at a step agreed by all ranks, after a preemption notice to one of them.

A loop may stop between two batches, after the update of the last batch and of the learning rate, and before the next
batch is read. Passing such a point costs a few additions: it only reads this process's memory.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final
from weakref import WeakSet

import torch

from ...distributed.failures import AGENTS_ERROR_FILE, RECORDS_VARIABLE, forget_saved, record_saved
from ...distributed.world import World, release_before_leaving
from ...errors import SettingError
from ...seams import LoopHook, Members
from ...settings import env
from ...settings.preemption import PREEMPTED_EXIT_CODE, PreemptionOptions
from ...training.optimizer import AcceleratedOptimizer
from ...wording import by_number
from .agreement import StopAgreement
from .notices import Notices
from .policy import PreemptionPolicy

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from .agreement import Point

_log = logging.getLogger(__name__)


def attach(run: Accelerator, asked: PreemptionOptions) -> LoopHook | None:
    """Return the hook that stops ``run`` after a notice, as a policy or the launcher's options say.

    None if it isn't needed: this Accelerator has no folder, or the run's members pass notices on themselves.

    Raises:
        SettingError: the run should save automatically, and has no folder.
        TypeError: the Accelerator's argument isn't a policy.
    """
    source, project_dir = "Accelerator(preemption=...)", run.project_configuration.project_dir
    policy = asked
    if asked is run.settings.preemption:
        policy, source = PreemptionPolicy(), run.settings.quote("preemption.save_on_signal")
        if project_dir is None and Preemption.is_led():
            _log.warning(
                "%s saves when a notice of preemption comes, but this Accelerator has no folder: an earlier one of "
                "this process, which has one, saves in its own loop only. Give this one project_dir=... if it trains.",
                source,
            )
            return None
    if not isinstance(policy, PreemptionPolicy):
        raise TypeError(
            f"`preemption` has to be a PreemptionPolicy, not {type(policy).__name__}: {policy!r}. "
            "Give PreemptionPolicy(...)."
        )
    if policy.save_on_signal and project_dir is None:
        raise SettingError(
            f"{source} saves when a notice of preemption comes, but the run has no folder. Give "
            "Accelerator(project_dir=...), and let the script call `accelerator.resume()` before its loop."
        )
    if run.world.members is not None:
        _tell_members(run.world, run.world.members, policy)
        return None
    hook = Preemption(policy, run, run._models, run._optimizers)
    hook.start()
    return hook


def _tell_members(world: World, members: Members, policy: PreemptionPolicy) -> None:
    """Make the members of a run, who agree with each other in each update, pass on notices to this process.

    Raises:
        SettingError: the policy says that the script itself saves.
    """
    if not policy.save_on_signal:
        raise SettingError(
            "PreemptionPolicy(save_on_signal=False) under `accelerate launch --keep_replicas` isn't built: its ranks "
            "share gradients only. Leave it out, or --keep_replicas."
        )

    def start() -> Notices:
        notices = _notices(world, policy)
        notices.start()
        release_before_leaving(notices.stop)
        return notices

    members.end_on(start, policy.exit_code)


def _notices(world: World, policy: PreemptionPolicy) -> Notices:
    is_first = world.is_local_main  # it tells the host's other ranks
    file, url = (policy.notice_file, policy.notice_url) if is_first else (None, None)
    return Notices(policy.signals, file, url)


@final
class Preemption(LoopHook):
    """The points in one Accelerator's loop, and the end of the loop at the point on which all ranks agree.

    Only one loop of a process stops: that of its newest Accelerator that has passed a point. Earlier Accelerators, such
    as those of another batch size or of another notebook cell, hand over their listener.
    """

    _leading: ClassVar[Preemption | None] = None

    def __init__(
        self,
        policy: PreemptionPolicy,
        run: Accelerator,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[AcceleratedOptimizer],
    ) -> None:
        self._policy, self._run, self._gradient_state = policy, run, run.gradient_state
        self._models, self._optimizers = models, optimizers
        self._world = world = run.world
        leading = Preemption._leading
        self._leads = leading is None or not leading._agreement.is_running
        if leading is None:
            forget_saved(env.read(RECORDS_VARIABLE), world.rank)
        self._loops = 0  # number of earlier loops in this process
        if leading is not None and not self._leads:
            self._notices, self._agreement = leading._notices, leading._agreement
        else:
            self._notices = _notices(world, policy)
            self._agreement = StopAgreement(self._notices, world.coordinator, policy.grace_seconds)
        self._backwards = self._batches = self._step_calls = 0
        self._training_loaders: WeakSet[Any] = WeakSet()
        self._newest: weakref.ref[Any] | None = None  # the loader whose loop has passed the last point
        self._has_warned = False  # that a loop isn't the main thread's
        self.is_over: bool = False  # whether all ranks have reached the agreed point

    def start(self) -> None:
        """Listen for notices until the world ends, and stop at the points of the prepared loaders' loops."""
        if self._leads:
            Preemption._leading = self
            if not self._notices.start() and self._policy.signals:
                _log.warning(
                    "Preemption: %s aren't heard, because this Accelerator wasn't made in the process's main thread, "
                    "which alone takes signals (on POSIX systems). Make it there, or give notice_file or notice_url.",
                    ", ".join(self._policy.signals),
                )
            self._warn_of_exit_code()
            self._agreement.start()
            release_before_leaving(self._agreement.stop)

    def _warn_of_exit_code(self) -> None:
        """Warn if the launcher's batch script wouldn't requeue the job after the policy's exit code."""
        asked = self._run.settings.preemption.save_on_signal and self._policy.save_on_signal
        code, job = self._policy.exit_code, env.read("SLURM_JOB_ID")
        if asked and job and code != PREEMPTED_EXIT_CODE and self._world.is_main:
            _log.warning(
                "Preemption: PreemptionPolicy(exit_code=%d), but the batch script that `accelerate launch` writes "
                "queues the Slurm job (%s) again after exit code %d only. Leave exit_code out, or compare with %d in "
                "a script of your own.", code, job, PREEMPTED_EXIT_CODE, code,
            )  # fmt: skip

    def _take_over(self) -> None:
        before = Preemption._leading
        assert before is not None
        before._gradient_state.hooks.remove(before)
        self._leads, before._leads, self._loops = True, False, before._loops + 1
        self._agreement.allow(self._policy.grace_seconds)
        Preemption._leading = self

    @classmethod
    def is_led(cls) -> bool:
        """Return whether an earlier Accelerator of this process listens for notices and saves."""
        leading = cls._leading
        return leading is not None and leading._policy.save_on_signal and leading._agreement.is_running

    # -- points --------------------------------------------------------------------------------------------

    def begin_pass(self, loader: object) -> None:
        """Pass a point before the first batch of a pass over ``loader``; raise like :meth:`between_batches`."""
        self.between_batches(loader, begins=True)

    def between_batches(self, loader: Any | None, begins: bool = False) -> None:
        """Pass a point between two batches of ``loader``, or in a loop without a prepared loader.

        Raises:
            SystemExit: the run ends here, on all ranks.
        """
        if not self._policy.save_on_signal:
            return
        if not self._leads:
            self._take_over()
        gradient_state = self._gradient_state
        loader = gradient_state if loader is None else loader  # a placeholder for loops without a prepared loader
        step_calls = gradient_state.num_step_calls
        has_trained = gradient_state.num_backwards != self._backwards or step_calls != self._step_calls
        if has_trained:
            self._step_calls = step_calls
            if self._newest is not None and (newest := self._newest()) is not None:
                self._training_loaders.add(newest)
            if len(gradient_state.loaders.references) > 1:  # their batches were trained on together
                self._training_loaders.update(gradient_state.loaders.all())
        if self._newest is None or self._newest() is not loader:
            self._newest = weakref.ref(loader)
        point = self._pass_point()
        if self._agreement.is_asked:
            self._stop_if_agreed(point, loader, begins, has_trained)

    def _pass_point(self) -> Point:
        """Count a point, publish it as this loop's last one, and return it."""
        backwards = self._gradient_state.num_backwards
        self._batches = self._batches + 1 if backwards == self._backwards else 0
        self._backwards = backwards
        self._agreement.passed = point = (self._loops, backwards, self._batches)
        return point

    def asks_to_end(self) -> bool:
        """Return whether the run should end, for scripts that end it themselves; each call passes a point."""
        if self._policy.save_on_signal or self.is_over:
            return self.is_over
        if not self._leads:
            if self._loops or self._batches:  # a newer Accelerator's loop has taken over
                return False
            self._take_over()
        point = self._pass_point()
        if self._agreement.is_asked:
            self.is_over = self._are_all_at(point)
            if self.is_over:
                self._tell_launcher()
        return self.is_over

    # -- the end -------------------------------------------------------------------------------------------

    def _are_all_at(self, point: Point, leaves_evaluation: bool = False) -> bool:
        """Return whether all ranks are here and the run ends; False if there is time to finish an evaluation first."""
        agreement = self._agreement
        agreed = agreement.wait_for_decision(point)
        if agreed is None or point <= agreed:
            return False
        _, backwards, batches = point
        where = f"{batches} batches after {backwards} backward passes"
        return agreement.meet(where, goes_on=leaves_evaluation and agreement.may_finish)

    def _stop_if_agreed(self, point: Point, loader: Any, begins: bool, has_trained: bool) -> None:
        """Save and end the process if this is the agreed point; at other points, only wait."""
        if threading.current_thread() is not threading.main_thread():
            self._warn_of_thread()
            return  # reads ahead of the loop
        leaves_evaluation = loader not in self._training_loaders and not begins and not has_trained
        leaves_evaluation = leaves_evaluation and loader is not self._gradient_state and self._is_evaluating()
        if not self._can_stop(loader, begins, has_trained, leaves_evaluation):
            self._agreement.wait_for_decision(point)
            return
        if not self._are_all_at(point, leaves_evaluation):
            return
        self.is_over = True
        if leaves_evaluation:
            loader.progress.finish(loader.progress.epoch)  # so that the next evaluation is a full one
        self._save_and_exit(", inside of an evaluation that isn't repeated" if leaves_evaluation else "")

    def _can_stop(self, loader: Any, begins: bool, has_trained: bool, leaves_evaluation: bool) -> bool:
        """Return whether a stop here loses no batch and no gradient."""
        gradient_state = self._gradient_state
        if not gradient_state.sync_gradients or (gradient_state.awaits_step and self._has_own_steps()):
            return False  # inside of an accumulation window
        is_known = loader in self._training_loaders
        if begins:
            # Before the first batch of an evaluation, a resumed run can't have the same random states. And if another
            # loop runs, it has a batch that isn't trained on yet.
            return is_known and not any(other is not loader for other in gradient_state.loaders.all())
        if has_trained:
            return True
        if is_known or getattr(loader, "is_interleaved", False):
            return False  # batches are collected or skipped; there will be a point after training
        return not (leaves_evaluation and self._policy.finish_evaluation)

    def _is_evaluating(self) -> bool:
        """Return whether the loop certainly doesn't train."""
        if not torch.is_grad_enabled():
            return True
        return bool(self._models) and not any(model.training for model in self._models)

    def _has_own_steps(self) -> bool:
        """Return whether prepared optimizers step in separate calls, not in the backward pass or in an engine."""
        return any(
            type(one).step is AcceleratedOptimizer.step and not one.is_fused_into_backward for one in self._optimizers
        )

    def _warn_of_thread(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Preemption (%s): batches are read in the thread %r, where the run can't be saved: it ends at points "
                "of the main thread's loops. Read the prepared loader there.",
                self._agreement.notice, threading.current_thread().name,
            )  # fmt: skip

    def _save_and_exit(self, left: str) -> None:
        notice, code = self._agreement.notice, self._policy.exit_code
        self._run.project_configuration.automatic_checkpoint_naming = True  # where `resume()` looks
        folder = self._run.save_state(asynchronous=False, details={"preempted": str(notice)})
        if self._world.is_main:
            ranks = by_number(self._world.size, "rank", "ranks")
            print(
                f"accelerate: preempted by {notice}. All {self._world.size} {ranks} saved {folder} after "
                f"{self._backwards} backward passes of this process{left}, and end with exit code {code}.",
                file=sys.stderr,
            )
        self._notices.ignore()
        self._tell_launcher()
        raise SystemExit(code)

    def _tell_launcher(self) -> None:
        attempt = env.read(AGENTS_ERROR_FILE)
        record_saved(env.read(RECORDS_VARIABLE), self._world.rank, self._policy.exit_code, attempt)
