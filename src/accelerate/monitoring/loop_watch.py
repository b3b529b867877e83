"""The watch of a loop whose script asks for none, for ``accelerate launch --monitor``.

There is no collective and no rule in it: each rank writes its own numbers, as nobody has said that all
ranks' loops make the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch

from .run_monitor import RunWatch, WatchedRun, watch

_UPDATES_PER_REPORT: Final = 10


@final
class LoopWatch:
    """A callable that is given each micro-batch's loss; the steps of the first prepared optimizer are the updates.

    An optimizer that has no hooks, as an engine's own, steps at the backward that completes an accumulation window.
    """

    def __init__(self, run: WatchedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run, self._optimizers = run, optimizers
        self._watch: RunWatch | None = None
        self._has_hook = False
        self._losses: list[torch.Tensor] = []

    def __call__(self, loss: torch.Tensor, resumed: Mapping[str, Any] | None) -> RunWatch:
        """Keep ``loss``, read at the next report; return the watch, which goes on from ``resumed``."""
        if self._watch is None:
            self._watch = self._begin(resumed)
        self._losses.append(loss.detach())
        if not self._has_hook and self._run.gradient_state.sync_gradients:
            self._end_update()
        return self._watch

    def _begin(self, resumed: Mapping[str, Any] | None) -> RunWatch:
        inner = getattr(self._optimizers[0], "optimizer", None) if self._optimizers else None
        if isinstance(inner, torch.optim.Optimizer):
            inner.register_step_post_hook(lambda *_: self._end_update())
            self._has_hook = True
        return watch(
            self._run, self._optimizers, every=_UPDATES_PER_REPORT, callbacks=(), total_steps=None, rules=None,
            flops=None, print_line=False, log=False, resumed=resumed, is_alone=True,
        )  # fmt: skip

    def _end_update(self) -> None:
        losses = self._losses
        if self._watch is None or not losses:  # a step without a backward of the Accelerator
            return
        samples = None if self._run.gradient_state.num_steps == 1 else len(losses) * self._watch.samples_per_batch
        self._watch.step(losses[0] if len(losses) == 1 else torch.stack(losses).mean(), samples=samples)
        losses.clear()
