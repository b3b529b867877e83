"""The gradient scaler's update: once, after the step of the last optimizer of a window.

``scaler.update()`` clears the unscaled state of all optimizers, and may change the scale. Between the steps of two
optimizers, it would make the second one's gradients unscaled twice, or by a wrong scale. So the update waits while
another optimizer has gradients that no step has used, or a window is open. It comes at the latest before the next
backward (a GAN's discriminator has gradients of the generator's loss, which no step ever uses).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..torch_private.modules import has_scaled_gradients, has_stepped, loss_scale, step_again

if TYPE_CHECKING:
    from .accumulation import GradientState


def update_once(scaler: torch.amp.GradScaler, gradient_state: GradientState) -> None:
    """Update ``scaler`` after an optimizer's step; if others still have to step, before the next backward."""
    waits = gradient_state.has_unfinished()
    if scaler.is_enabled() and (waits or next(_waiting(scaler, gradient_state), None) is not None):
        gradient_state.update_scaler = partial(_update_between_windows, scaler, gradient_state)
    else:
        gradient_state.update_scaler = None
        scaler.update()


def update_now(scaler: torch.amp.GradScaler, gradient_state: GradientState) -> None:
    """Update ``scaler``, and convert gradients that no step has used to the new scale."""
    gradient_state.update_scaler = None
    unused = list(_waiting(scaler, gradient_state))
    before = loss_scale(scaler)
    stages = [has_scaled_gradients(scaler, optimizer) for optimizer, _ in unused]
    scaler.update()
    for (_, gradient), is_scaled in zip(unused, stages, strict=True):
        factor = loss_scale(scaler) / before if is_scaled else loss_scale(scaler)
        local: Any = getattr(gradient, "to_local", None)
        (gradient if local is None else local()).mul_(factor.to(gradient.device))


def _update_between_windows(scaler: torch.amp.GradScaler, gradient_state: GradientState, before_backward: bool) -> None:
    if not gradient_state.has_unfinished(before_backward=before_backward):
        update_now(scaler, gradient_state)
    elif before_backward:  # it adds scaled gradients also for optimizers that have stepped
        for prepared in gradient_state.scaled_optimizers:
            if prepared.scaler is scaler and has_stepped(scaler, prepared.optimizer):
                step_again(scaler, prepared.optimizer)


def _waiting(
    scaler: torch.amp.GradScaler, gradient_state: GradientState
) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Iterate over the optimizers that haven't stepped since the last update of ``scaler``, with their gradients."""
    for prepared in gradient_state.scaled_optimizers:
        optimizer = prepared.optimizer
        if prepared.scaler is scaler and not has_stepped(scaler, optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        yield optimizer, parameter.grad
