"""A run whose replicas are kept: at a step's end, processes join that take the place of lost ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

from ..distributed.membership import Membership
from ..distributed.random import capture_host_streams, restore_rng_states
from ..distributed.world import World
from ..errors import SettingError
from ..settings.tree import Settings
from .accumulation import GradientState


class JoinedRun(Protocol):
    """The parts of an Accelerator that a process which joins takes over from another rank."""

    settings: Settings
    world: World
    gradient_state: GradientState
    _models: Sequence[Any]
    _optimizers: Sequence[Any]
    _schedulers: Sequence[Any]
    _dataloaders: Sequence[Any]
    _custom_objects: Sequence[Any]


def join_replicas(run: JoinedRun, *, has_policy: bool) -> None:
    """Let processes join ``run`` between its batches, or this process join the others before its first batch.

    Raises:
        SettingError: the run is also to save when a preemption comes, or computes in fp16 or fp8.
    """
    precision = run.settings.run.mixed_precision
    asked = ["preemption=" if has_policy else ""]
    asked += ["save_on_signal" if run.settings.preemption.save_on_signal else ""]
    asked += [f"mixed_precision={precision}" if precision in ("fp16", "fp8") else ""]
    if named := ", ".join(filter(None, asked)):
        raise SettingError(
            f"{named} under `accelerate launch --keep_replicas` isn't built: the ranks of such a run share gradients "
            "only. Leave it out, or --keep_replicas."
        )
    assert run.world.replicas is not None, "called only then"
    run.gradient_state.between_batches = _KeptRun(run, run.world.replicas).between_batches


@final
class _KeptRun:
    """The places between two batches, at which a process may join."""

    def __init__(self, run: JoinedRun, membership: Membership) -> None:
        self._run, self._membership = run, membership

    def between_batches(self, loader: object, begins: bool = False) -> None:
        """Join, or let others join, before the next batch of ``loader``."""
        membership = self._membership
        if membership.is_joining:
            if loader in self._run._dataloaders:
                self._restore(membership.receive_state())
        elif membership.joining and getattr(loader, "is_trained", False) and self._run.gradient_state.sync_gradients:
            membership.admit(lambda: self._state(loader if begins else None))

    def _state(self, begun: object) -> dict[str, object]:
        """Return what ranks have in common, where a pass over ``begun`` begins."""
        run = self._run
        return {
            "stateful": [one.state_dict() for one in self._stateful()],
            "num_updates": [optimizer.num_updates for optimizer in run._optimizers],
            "loaders": [loader.shared_state(begins=loader is begun) for loader in run._dataloaders],
            "streams": capture_host_streams(("python", "torch")),
            "step": run.gradient_state.step,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        run = self._run
        for one, saved in zip(self._stateful(), state["stateful"], strict=True):
            one.load_state_dict(saved)
        for optimizer, count in zip(run._optimizers, state["num_updates"], strict=True):
            optimizer.num_updates = count
        for loader, saved in zip(run._dataloaders, state["loaders"], strict=True):
            loader.restore_shared(saved)
        restore_rng_states(state["streams"])
        run.gradient_state.step = state["step"]

    def _stateful(self) -> list[Any]:
        run = self._run
        return [*run._models, *run._optimizers, *run._schedulers, *run._custom_objects]
