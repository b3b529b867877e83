"""The watch of a loop whose script asks for none, for ``accelerate launch --monitor``.

There is no collective and no rule in it: each rank writes its own numbers, as nobody has said that all
ranks' loops make the same calls.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_not
from typing import Any, Final, final

import torch
from torch.utils.hooks import RemovableHandle

from .run_monitor import RunWatch, WatchedRun, watch

_UPDATES_PER_REPORT: Final = 10
#: So many losses are kept where no update follows them, as nobody else frees them then.
_MAX_LOSSES: Final = 1024


@final
class LoopWatch:
    """A callable that is given each micro-batch's loss; the steps of one prepared optimizer are the updates.

    It is the one that steps first, until `free_memory` has been called. Where none has hooks, as an engine's own, an
    update is the backward that completes an accumulation window.
    """

    def __init__(self, run: WatchedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run, self._optimizers = run, optimizers
        self._watch: RunWatch | None = None
        self._followed: list[torch.optim.Optimizer] = []
        self._counted: object = None
        self._hooks: list[RemovableHandle] = []
        self._losses: deque[tuple[torch.Tensor, torch.Tensor | float]] = deque(maxlen=_MAX_LOSSES)

    def __call__(
        self, loss: torch.Tensor, resumed: Mapping[str, Any] | None, weight: torch.Tensor | float | None = None
    ) -> RunWatch:
        """Keep ``loss``, read at the next report; return the watch, which goes on from ``resumed``.

        Args:
            weight: how many items it sums over; without one it is their mean.
        """
        if self._watch is None:
            self._watch = self._begin(resumed)
        if len(self._optimizers) != len(self._followed) or any(map(is_not, self._optimizers, self._followed)):
            self._follow()
        if loss.ndim:
            loss = loss.float().mean() if weight is None else loss.float().sum()
        self._losses.append((loss.detach(), 1.0 if weight is None else weight))
        if not self._hooks and self._run.gradient_state.sync_gradients:
            self._end_update()
        return self._watch

    def _begin(self, resumed: Mapping[str, Any] | None) -> RunWatch:
        return watch(
            self._run, self._optimizers, every=_UPDATES_PER_REPORT, callbacks=(), total_steps=None, rules=None,
            flops=None, print_line=False, log=False, resumed=resumed, is_alone=True,
        )  # fmt: skip

    def _follow(self) -> None:
        """Count the steps of the optimizers that are prepared now."""
        for hook in self._hooks:
            hook.remove()
        if not any(id(prepared) == self._counted for prepared in self._optimizers):
            self._counted = None
            self._losses.clear()  # of the model before
        self._followed, self._hooks = [*self._optimizers], []
        for prepared in self._followed:
            inner = getattr(prepared, "optimizer", None)
            if isinstance(inner, torch.optim.Optimizer):
                with contextlib.suppress(AttributeError):  # of a subclass that doesn't call torch's constructor
                    self._hooks.append(inner.register_step_post_hook(partial(self._note_step, id(prepared))))

    def _note_step(self, prepared: int, *_: object) -> None:
        if self._counted is None:
            self._counted = prepared
        if self._counted == prepared:
            self._end_update()

    def _end_update(self) -> None:
        losses, run = self._losses, self._run
        if self._watch is None or not losses:  # a step without a backward of the Accelerator
            return
        samples = None if run.gradient_state.num_steps == 1 else len(losses) * self._watch.samples_per_batch
        self._watch.step(_mean(losses), samples=samples)
        losses.clear()


def _mean(losses: Sequence[tuple[torch.Tensor, torch.Tensor | float]]) -> torch.Tensor:
    """Return the mean over the items of ``losses``, each a sum over as many items as its weight says."""
    first, weight = losses[0]
    if len(losses) == 1 and isinstance(weight, float) and weight == 1.0:
        return first
    sums = torch.stack([loss.to(first.device, torch.float32) for loss, _ in losses])
    weights = [torch.as_tensor(weight, dtype=torch.float32, device=first.device) for _, weight in losses]
    return sums.sum() / torch.stack(weights).sum().clamp(min=1e-12)  # none at all: 0
