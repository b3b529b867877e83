"""Checks against silent faults: replicas that hold other values, hardware that computes or remembers wrong. Internal.

- `replica_check`: parameters and optimizer states of replicas, compared bit by bit.
- `hardware_check`: an update that is computed again, and compared.
- `recorded_pass`: the passes of a model, recorded so that they can be computed again.
- `python_state`: what modules keep in Python, put back after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, final
from weakref import ref

from ...seams import Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from .replica_check import Difference, Replicas

GUEST: Final = Guest(
    runs=(f"{__name__}:Checks",),
    functions={name: f"{__name__}:{name}" for name in ("compare", "difference", "check_hardware")},
)


@final
class Checks(LoopHook):
    """The checks of one Accelerator: of replicas before each save, of hardware until its models are dropped."""

    def __init__(self, run: Accelerator, asked: object = None) -> None:
        self._run = ref(run)  # it owns the hooks
        self._ends: list[Callable[[], None]] = []

    def before_save(self) -> None:
        """Compare replicas, as ``ProjectConfiguration(compare_replicas=...)`` says."""
        run = self._run()
        if run is None or run.world.size == 1:
            return
        action = run.project_configuration.compare_replicas
        if action != "no":  # costly to import
            replicas_of(run).check(action)

    def free_memory(self) -> None:
        """End the checks of hardware: models and optimizers have none of their hooks any more."""
        while self._ends:
            self._ends.pop()()

    def check_hardware(self, every: int, action: Literal["raise", "warn"]) -> None:
        """Check the hardware from here on, in place of what an earlier call asked; 0 ends it."""
        run = self._run()
        if not every or run is None:
            self.free_memory()
            return
        from .hardware_check import check_hardware

        check_hardware(run.strategy, run._wrapped_models, run._optimizers, every, action, self._ends, self.free_memory)


def compare(run: Accelerator, action: Literal["warn", "raise", "no"]) -> None:
    """Warn or raise if the replicas of ``run`` differ. A collective."""
    replicas_of(run).check(action, operation="compare_replicas")


def difference(run: Accelerator) -> Difference | None:
    """Return how the replicas of ``run`` differ. A collective."""
    return replicas_of(run).difference()


def check_hardware(run: Accelerator, every: int, action: Literal["raise", "warn"]) -> None:
    """Check the hardware of ``run`` from here on; see :class:`Checks`."""
    (hook, *_) = run.gradient_state.hooks.of(Checks)
    hook.check_hardware(every, action)


def replicas_of(run: Accelerator) -> Replicas:
    """Return what ``run`` has prepared, to be compared."""
    from .replica_check import Replicas

    return Replicas(run.strategy.state, run._wrapped_models, run._optimizers, run.world)
