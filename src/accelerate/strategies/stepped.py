"""Optimizer and scheduler of an engine that steps by itself: in the loop they only say what has happened."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler


class SteppedOptimizer(AcceleratedOptimizer, ABC):
    """An engine's optimizer: ``step`` and ``zero_grad`` have already happened, in the engine's own step."""

    #: The attribute of the engine's optimizer that says whether its last step left the parameters alone.
    _skipped: ClassVar[str]

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine clears gradients when it steps."""

    def step(self, closure: Any = None) -> None:
        """Nothing: the engine has moved the parameters."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine's last step left the parameters alone because of an fp16 overflow."""
        return bool(getattr(self.optimizer, self._skipped, False))


class SteppedScheduler(AcceleratedScheduler, ABC):
    """An engine's scheduler: ``step`` has already happened, in the engine's own step."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine steps its scheduler when it steps."""
