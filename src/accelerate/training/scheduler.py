"""The scheduler wrapper: the learning rate changes only when the optimizer stepped."""

from __future__ import annotations

from typing import Any

from ..distributed.world import current_world
from ..errors import SettingError
from ..torch_private.modules import count_step, step_count
from .accumulation import GradientState
from .optimizer import AcceleratedOptimizer


def check_mode(mode: str) -> None:
    """Raise SettingError if ``mode`` isn't a scheduler mode."""
    if mode not in ("samples", "updates"):
        raise SettingError(f"scheduler_mode={mode!r}: a schedule is stated in 'samples' or in 'updates'.")


class AcceleratedScheduler:
    """A learning-rate scheduler wrapper that steps only with optimizer updates.

    Schedules are written for the length of one process's loader. With ``split_batches=False``, the loader of N
    processes is N times shorter, so the documented mode (``mode="samples"``) advances the schedule N times per call.
    ``mode="updates"`` advances it once per optimizer update, for schedules in updates: the curve is the same on 1, 2
    and 4 processes.

    Args:
        scheduler: the scheduler to wrap.
        optimizers: the prepared optimizer or optimizers of the scheduler.
        step_with_optimizer: False to step in every call.
        split_batches: whether the loaders split their batches, so their lengths don't change.
        num_processes: over how many processes the data is sharded.
        mode: ``"samples"`` or ``"updates"``.
    """

    _is_accelerate_prepared = True  # libraries ask prepared objects for it

    def __init__(
        self,
        scheduler: object,
        optimizers: AcceleratedOptimizer | list[AcceleratedOptimizer] | tuple[AcceleratedOptimizer, ...],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        num_processes: int | None = None,
        mode: str = "samples",
        gradient_state: GradientState | None = None,
    ) -> None:
        check_mode(mode)
        self.scheduler: Any = scheduler
        self.optimizers: list[AcceleratedOptimizer] = (
            list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        )
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state: GradientState = gradient_state or GradientState()
        world = current_world()
        num_processes = num_processes or (1 if world is None else world.size)
        self._steps_per_update = 1 if split_batches or mode == "updates" else num_processes
        # Only a schedule in samples counts micro-batches.
        self._counts_micro_batches = mode != "updates"

    def step(self, *args: object, **kwargs: object) -> None:
        """Advance the learning rate, if the optimizer stepped (or always, without ``step_with_optimizer``)."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self._counts_micro_batches and self.gradient_state.adjust_scheduler:
                count_step(self.scheduler)
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if args or kwargs:
            # A metric (ReduceLROnPlateau) is one observation for any number of processes.
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self._steps_per_update):
            # OneCycleLR raises after its end, and rounded lengths may need one more step.
            if getattr(self.scheduler, "total_steps", None) is None or (
                step_count(self.scheduler) <= self.scheduler.total_steps
            ):
                self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load ``state_dict`` into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_lr(self) -> list[float]:
        """Return the inner scheduler's next learning rates."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: object, **kwargs: object) -> object:
        """Print the inner scheduler's learning rate."""
        return self.scheduler.print_lr(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)
