"""Checks against silent errors: differing replicas, and hardware that computes or stores wrong values. Internal.

- `replica_check`: compare parameters and optimizer states of replicas bit by bit.
- `hardware_check`: recompute an update, and compare.
- `recorded_pass`: record the passes of a model, to recompute them.
- `python_state`: restore the Python state of modules after that.
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
        """Compare replicas if ``ProjectConfiguration(compare_replicas=...)`` says so."""
        run = self._run()
        if run is None or run.world.size == 1:
            return
        action = run.project_configuration.compare_replicas
        if action != "no":  # costly to import
            replicas_of(run).check(action)

    def free_memory(self) -> None:
        """End the hardware checks, and remove their hooks from models and optimizers."""
        while self._ends:
            self._ends.pop()()

    def check_hardware(self, every: int, action: Literal["raise", "warn"]) -> None:
        """Start hardware checks, which replace earlier ones; 0 ends them."""
        run, ends = self._run(), list[Callable[[], None]]()
        if every and run is not None:
            from .hardware_check import check_hardware

            ends = check_hardware(run.strategy, run._wrapped_models, run._optimizers, every, action)
        self.free_memory()
        self._ends = ends


def compare(run: Accelerator, action: Literal["warn", "raise", "no"]) -> None:
    """Warn or raise if the replicas of ``run`` differ; a collective."""
    replicas_of(run).check(action, operation="compare_replicas")


def difference(run: Accelerator) -> Difference | None:
    """Return how the replicas of ``run`` differ; a collective."""
    return replicas_of(run).difference()


def check_hardware(run: Accelerator, every: int, action: Literal["raise", "warn"]) -> None:
    """Check the hardware of ``run`` from here on; see :class:`Checks`."""
    (hook, *_) = run.gradient_state.hooks.of(Checks)
    hook.check_hardware(every, action)


def replicas_of(run: Accelerator) -> Replicas:
    """Return the replicas that ``run`` has prepared."""
    from .replica_check import Replicas

    return Replicas(run.strategy.state, run._wrapped_models, run._optimizers, run.world)
