"""The watch of a loop whose script doesn't call ``watch_run``, for ``accelerate launch --monitor``.

It has no collectives and no rules. Each rank writes its own numbers, because the loops of the ranks may make different
calls.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any, Final, final
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from ...errors import SettingError
from ...seams import LoopHook, function_of, guests
from .run_monitor import Loaded, RunMonitor, saved_watch

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...watching import RunWatch

_UPDATES_PER_REPORT: Final = 10
#: The maximum number of losses to keep if no update follows that would free them.
_MAX_LOSSES: Final = 1024


@final
class ToldWatch(LoopHook):
    """A hook that reports the Accelerator's events to the watch of a loop."""

    def __init__(self, watch: RunMonitor) -> None:
        self.watch: RunMonitor = watch

    def after_clip(self, norm: object) -> None:
        """Keep the norm for the next report."""
        self.watch.note_gradient_norm(norm)

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Return the watch's state; a collective that first reports recent losses, unless this rank saves alone."""
        return {"watch": {"updates": self.watch.updates} if alone else self.watch.before_save()}

    def after_save(self, folder: str, seconds: float, details: Mapping[str, object]) -> None:
        """Record the save, whose ``details`` may have a notice of preemption."""
        self.watch.saved(folder, seconds, details.get("preempted"))

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Continue from the watch's state in the checkpoint, if there is one."""
        if (saved := saved_watch((folder, details))) is not None:
            self.watch.resume(saved)

    def end_run(self) -> None:
        """Complete the files."""
        self.watch.finish()


@final
class LoopWatch(LoopHook):
    """The watch of a loop by its losses; the steps of one prepared optimizer are the updates.

    It is the optimizer that steps first, until `free_memory` is called. If no optimizer has hooks, as in an engine, an
    update is the backward that completes an accumulation window.
    """

    def __init__(self, run: Accelerator, loaded: Callable[[], Loaded | None]) -> None:
        self._run, self._optimizers = ref(run), run._optimizers  # it owns the hooks
        self._loaded = loaded
        self._watch: RunMonitor | None = None
        self._noted: object = None
        self._followed: list[torch.optim.Optimizer] = []
        self._counted: object = None
        self._hooks: list[RemovableHandle] = []
        self._losses: deque[tuple[torch.Tensor, torch.Tensor | float]] = deque(maxlen=_MAX_LOSSES)

    def before_backward(self, loss: object, weight: object) -> None:
        """Record the loss before the backward in which an engine steps."""
        if loss is not None:
            self._note(loss, weight)

    def after_backward(self, loss: object, weight: object) -> None:
        """Record the loss, unless :meth:`before_backward` has recorded it."""
        if loss is not self._noted:
            self._note(loss, weight)
        self._noted = None

    def _note(self, loss: Any, weight: Any) -> None:
        """Keep ``loss``, which is read at the next report.

        Args:
            weight: the number of items in the sum; None if the loss is a mean.
        """
        run = self._run()
        if run is None:
            return
        self._noted = loss
        if self._watch is None:
            self._watch = self._begin(run)
        if len(self._optimizers) != len(self._followed) or any(map(is_not, self._optimizers, self._followed)):
            self._follow()
        if loss.ndim:
            loss = loss.float().mean() if weight is None else loss.float().sum()
        self._losses.append((loss.detach(), 1.0 if weight is None else weight))
        if not self._hooks and run.gradient_state.sync_gradients:
            self._end_update()

    def _begin(self, run: Accelerator) -> RunMonitor:
        made = RunMonitor(run, every=_UPDATES_PER_REPORT, resumed=saved_watch(self._loaded()), is_alone=True)
        run.gradient_state.hooks.add(ToldWatch(made))
        return made

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
        losses, run = self._losses, self._run()
        if self._watch is None or run is None or not losses:  # a step without a backward of the Accelerator
            return
        samples = None if run.gradient_state.num_steps == 1 else len(losses) * self._watch.samples_per_batch
        self._watch.step(_mean(losses), samples=samples)
        losses.clear()


def watch_script(
    run: Accelerator,
    loaded: Loaded | None,
    *,
    compare_replicas: bool | int,
    sdc_check: int,
    on_sdc: str,
    **options: Any,
) -> RunWatch:
    """Return the watch that a script creates, instead of the previous one, and start its checks.

    It continues from ``loaded``; see ``Accelerator.watch_run``.

    Raises:
        SettingError: any rank may be lost, so no rank can share its losses with the others; or a requested check can't
            be made, or its guest is missing.
    """
    if run.world.members is not None:
        raise SettingError(run.world.members.why_not("watch_run()"))
    hooks = run.gradient_state.hooks
    for before in (*hooks.of(LoopWatch), *hooks.of(ToldWatch)):
        hooks.remove(before)
    has_checks = "checks" in guests()
    if sdc_check or has_checks:
        function_of("checks", "check_hardware", f"watch_run(sdc_check={sdc_check})")(run, sdc_check, on_sdc)
    difference: Callable[[], object | None] | None = None
    if compare_replicas and (has_checks or compare_replicas is not True):  # the default, True, doesn't need the guest
        compare = function_of("checks", "difference", f"watch_run(compare_replicas={compare_replicas})")
        difference = partial(compare, run)
    made = RunMonitor(
        run, resumed=saved_watch(loaded), compare_replicas=compare_replicas, difference=difference, **options
    )
    hooks.add(ToldWatch(made))
    return made


def _mean(losses: Sequence[tuple[torch.Tensor, torch.Tensor | float]]) -> torch.Tensor:
    """Return the mean over the items of ``losses``; each loss is a sum over as many items as its weight."""
    first, weight = losses[0]
    if len(losses) == 1 and isinstance(weight, float) and weight == 1.0:
        return first
    sums = torch.stack([loss.to(first.device, torch.float32) for loss, _ in losses])
    weights = [torch.as_tensor(weight, dtype=torch.float32, device=first.device) for _, weight in losses]
    return sums.sum() / torch.stack(weights).sum().clamp(min=1e-12)  # none at all: 0
