"""The watch of a loop whose script asks for none, for ``accelerate launch --monitor``.

There is no collective and no rule in it: each rank writes its own numbers, as nobody has said that all
ranks' loops make the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.utils.hooks import RemovableHandle

from .run_monitor import RunWatch, WatchedRun, watch

_UPDATES_PER_REPORT: Final = 10
#: So many losses are kept where no update follows them, as nobody else frees them then.
_MAX_LOSSES: Final = 1024


@final
class LoopWatch:
    """A callable that is given each micro-batch's loss; the steps of the first prepared optimizer are the updates.

    An optimizer that has no hooks, as an engine's own, steps at the backward that completes an accumulation window.
    After `free_memory`, the optimizer that is prepared next takes the place of the first.
    """

    def __init__(self, run: WatchedRun, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._run, self._optimizers = run, optimizers
        self._watch: RunWatch | None = None
        self._followed: object = None
        self._hook: RemovableHandle | None = None
        self._losses: deque[torch.Tensor] = deque(maxlen=_MAX_LOSSES)

    def __call__(self, loss: torch.Tensor, resumed: Mapping[str, Any] | None) -> RunWatch:
        """Keep ``loss``, read at the next report; return the watch, which goes on from ``resumed``."""
        if self._watch is None:
            self._watch = self._begin(resumed)
        if self._optimizers and self._optimizers[0] is not self._followed:
            self._follow(self._optimizers[0])
        self._losses.append(loss.detach() if loss.ndim == 0 else loss.detach().float().mean())
        if self._hook is None and self._run.gradient_state.sync_gradients:
            self._end_update()
        return self._watch

    def _begin(self, resumed: Mapping[str, Any] | None) -> RunWatch:
        return watch(
            self._run, self._optimizers, every=_UPDATES_PER_REPORT, callbacks=(), total_steps=None, rules=None,
            flops=None, print_line=False, log=False, resumed=resumed, is_alone=True,
        )  # fmt: skip

    def _follow(self, prepared: torch.optim.Optimizer) -> None:
        """Count the steps of ``prepared`` from now on, and no more those of the one before."""
        if self._hook is not None:
            self._hook.remove()
            self._losses.clear()
        self._followed, self._hook = prepared, None
        inner = getattr(prepared, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            self._hook = inner.register_step_post_hook(lambda *_: self._end_update())

    def _end_update(self) -> None:
        losses = self._losses
        if self._watch is None or not losses:  # a step without a backward of the Accelerator
            return
        samples = None if self._run.gradient_state.num_steps == 1 else len(losses) * self._watch.samples_per_batch
        self._watch.step(losses[0] if len(losses) == 1 else torch.stack(tuple(losses)).mean(), samples=samples)
        losses.clear()
