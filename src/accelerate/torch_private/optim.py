"""Of torch's optimizers and gradient scaler: operations on lists of tensors, and what a scaler has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .names import uses


@uses(("torch:_foreach_copy_", "self, src, non_blocking"))
def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


@uses(("torch:_foreach_mul_", "self, scalars"))
def scale_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor, in place, by one factor."""
    torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]


@uses(("torch:_foreach_lerp_", "self, tensors1, weights"))
def move_each(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move each tensor, in place, towards its end by this part of the way."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)  # pyright: ignore[reportPrivateImportUsage]


@uses(("torch:_foreach_norm", "self, ord, dtype"))
def norm_of_each(tensors: Sequence[torch.Tensor], norm_type: float) -> Sequence[torch.Tensor]:
    """The norm of each tensor."""
    return torch._foreach_norm(tensors, norm_type)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


@uses(("torch:_amp_foreach_non_finite_check_and_unscale_", "self, found_inf, inv_scale"))
def unscale_each(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply each gradient by ``inv_scale``; ``found_inf`` becomes 1 where one isn't finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
        gradients,  # pyright: ignore[reportArgumentType]
        found_inf,
        inv_scale,
    )


@uses("torch.ops.aten:_indices", "torch.ops.aten:_values")
def parts_of_sparse(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values as they lie there: rows that come several times are not added up."""
    return torch.ops.aten._indices.default(gradient), torch.ops.aten._values.default(gradient)


@uses("torch.amp.grad_scaler:OptState.READY", "torch.amp.grad_scaler:._per_optimizer_states")
def has_scaled_gradients(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``scaler.unscale_(optimizer)`` hasn't been called since the last update."""
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@uses(("torch.amp.grad_scaler:GradScaler._found_inf_per_device", "self, optimizer"))
def overflows_by_device(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """The flags of the last ``scaler.step(optimizer)``, one a device; they are gone after ``scaler.update()``."""
    return scaler._found_inf_per_device(optimizer)


@uses(
    "torch.optim.optimizer:._optimizer_step_pre_hooks",
    "torch.optim.optimizer:._optimizer_step_post_hooks",
)
def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """What is called before and after each step of ``optimizer``."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def set_step_hooks(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> None:
    """Replace what :func:`step_hooks` returns."""
    optimizer._optimizer_step_pre_hooks = before
    optimizer._optimizer_step_post_hooks = after


@uses("torch.optim.lr_scheduler:._step_count")
def steps_counted(scheduler: Any) -> int:
    """How often ``scheduler`` has stepped, its first value included."""
    return scheduler._step_count


@uses("torch.optim.lr_scheduler:._step_count")
def count_step(scheduler: Any) -> None:
    """Count a step that ``scheduler`` didn't take."""
    scheduler._step_count += 1
