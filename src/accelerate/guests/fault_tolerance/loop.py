"""The loop of a fault-tolerant run: processes join between batches, or too few ranks save and end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, final

from ...distributed.failures import RECORDS_VARIABLE, record_saved
from ...distributed.random import capture_host_streams, restore_rng_states
from ...errors import SettingError
from ...seams import LoopHook
from ...settings import env
from .membership import Membership
from .shared_epoch import SharedLoader, running_loaders

if TYPE_CHECKING:
    from ...accelerator import Accelerator


def join_replicas(run: Accelerator) -> LoopHook:
    """Return the hook that lets processes join ``run`` between batches, or this process before its first batch.

    Raises:
        SettingError: the run has a minimum of ranks but no folder to save to, or it computes in fp8.
    """
    precision = run.settings.run.mixed_precision
    if precision == "fp8":
        raise SettingError(
            "mixed_precision=fp8 under `accelerate launch --keep_replicas` isn't built: a new process would need the "
            "scales of the others. Use bf16 or fp16, or leave --keep_replicas out."
        )
    membership = run.world.members
    assert isinstance(membership, Membership), "called only then"
    if membership.minimum > 1 and run.project_configuration.project_dir is None:
        raise SettingError(
            f"Where fewer than --min_replicas {membership.minimum} live, the ranks save and end, but the run has no "
            "folder. Give Accelerator(project_dir=...) and let the script call `accelerator.resume()` before its loop."
        )
    if membership.num_stages > 1:
        run.mesh = membership.placed(run.mesh)
    membership.count_steps = lambda: sum(int(optimizer.num_updates) for optimizer in run._optimizers)
    membership.running_loaders = lambda: running_loaders(run.gradient_state)
    return _KeptRun(run, membership)


@final
class _KeptRun(LoopHook):
    """The points between two batches at which a process may join."""

    def __init__(self, run: Accelerator, membership: Membership) -> None:
        self._run, self._membership = run, membership
        self._state_to_enter_with: dict[str, Any] | None = None

    def begin_pass(self, loader: object) -> None:
        """Do the same as :meth:`between_batches` before the first batch of a pass over ``loader``."""
        self.between_batches(loader, begins=True)

    def between_batches(self, loader: object, begins: bool = False) -> None:
        """Join, let others join, or save and end, before the next batch of ``loader``.

        Raises:
            SystemExit: too few ranks live, or one is preempted; the run is saved.
        """
        membership = self._membership
        if membership.is_joining:
            if loader in self._run._dataloaders:
                self._join(begins)
        elif membership.is_entering:
            if begins and getattr(loader, "is_trained", False):
                self._enter()
        elif not membership.joining and not membership.ending:
            return
        elif self._run.gradient_state.sync_gradients and self._is_outermost(loader, begins):
            awaited = [self._run._dataloaders[number] for number in membership.awaited]
            if membership.joining and all(one is loader or not one.is_trained for one in awaited):
                membership.admit(lambda: self._state(loader if begins else None))
            if membership.ending:
                self._save_and_end(loader, begins)

    def _is_outermost(self, loader: object, begins: bool) -> bool:
        """Return whether ``loader`` is trained with, in a loop that is inside of no other such loop."""
        if not isinstance(loader, SharedLoader) or not loader.is_trained:
            return False
        running = self._membership.running_loaders()
        others = [one for one in running if one is not loader and one.is_trained]
        return not others if begins else all(loader.began < one.began for one in others)

    def _join(self, begins: bool) -> None:
        """Become a member; if a pass ``begins``, skip passes until the script reaches the others' epoch."""
        awaits = self._membership.awaits
        state = self._membership.receive_state(None if awaits is None else self._run._dataloaders.index(awaits))
        if begins:
            self._state_to_enter_with = state
            for loader, (num_passes, first_epoch), saved in zip(
                self._run._dataloaders, state["passes"], state["loaders"], strict=True
            ):
                loader.miss_passes(num_passes, first_epoch, is_trained=bool(saved["trained"]))
        else:
            self._restore(state)
        self._membership.last_saved = state["saved"]
        self._membership.is_entering = True

    def _enter(self) -> None:
        """Continue at the others' position, with their state."""
        self._membership.is_entering = False
        if self._state_to_enter_with is not None:
            self._restore(self._state_to_enter_with)
            self._state_to_enter_with = None

    def _save_and_end(self, loader: Any, begins: bool) -> None:
        run, membership = self._run, self._membership
        if begins:
            loader.progress.start()  # don't continue an epoch that was left early
        run.project_configuration.automatic_checkpoint_naming = True  # where `resume()` looks
        folder = run.save_state(asynchronous=False, details={"ended": membership.ending})
        if membership.rank == min(membership.members):
            end = f"all ranks end with exit code {membership.exit_code}"
            print(f"accelerate: {membership.ending}. Saved {folder}, and {end}.", file=sys.stderr)
        if membership.notices is not None:
            membership.notices.ignore()
        record_saved(env.read(RECORDS_VARIABLE), membership.rank, membership.exit_code)
        raise SystemExit(membership.exit_code)

    def _state(self, begun: object) -> dict[str, object]:
        """Return the ranks' common state at the beginning of a pass over ``begun``."""
        run, running = self._run, self._membership.running_loaders()
        return {
            "stateful": [one.state_dict() for one in self._stateful()],
            "joint": [one.state_dict() for one in self._membership.joint_states],
            "num_updates": [optimizer.num_updates for optimizer in run._optimizers],
            "loaders": [one.shared_state(begins=one is begun or one not in running) for one in run._dataloaders],
            "passes": [loader.shared_passes(begins=loader is begun) for loader in run._dataloaders],
            "saved": self._membership.last_saved,
            "streams": capture_host_streams(("python", "torch")),
            "step": run.gradient_state.step,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        run = self._run
        for one, saved in zip(self._stateful(), state["stateful"], strict=True):
            one.load_state_dict(saved)
        for one, saved in zip(self._membership.joint_states, state["joint"], strict=False):  # others may have left them
            one.load_state_dict(saved)
        for optimizer, count in zip(run._optimizers, state["num_updates"], strict=True):
            optimizer.num_updates = count
        for loader, saved in zip(run._dataloaders, state["loaders"], strict=True):
            loader.restore_shared(saved)
        restore_rng_states(state["streams"])
        run.gradient_state.step = state["step"]

    def _stateful(self) -> list[Any]:
        run, scaler = self._run, self._run.precision.scaler
        scalers = [] if scaler is None else [scaler]
        models = map(run.strategy.unwrap, run._models)
        return [*models, *run._optimizers, *run._schedulers, *run._custom_objects, *scalers]
