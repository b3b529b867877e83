"""Choose a precision, and its gradient scaler, from the settings and the device.

For sharded gradients there is a scaler of its own: an overflow on one rank counts on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import distributed as dist

from ..devices.table import available_kind, kind_of
from ..distributed.world import World, current_world
from ..errors import SettingError
from ..modules import is_sharded
from ..torch_private.modules import unscale_each
from .base import AutocastPrecision, FullPrecision, Precision, TruePrecision
from .fp8 import Fp8Request, choose_backend, package_of

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs, GradScalerKwargs


def choose(
    label: str,
    device_type: str,
    *,
    autocast_handler: AutocastKwargs | None = None,
    scaler_handler: GradScalerKwargs | None = None,
    shards_over: World | None = None,
    fp8: Fp8Request | None = None,
    parameter_dtype: torch.dtype | None = None,
    has_bf16: bool | None = None,
) -> Precision:
    """Return the precision for ``label`` (no, fp16, bf16, fp8) on ``device_type``.

    Args:
        shards_over: the processes over which gradients are sharded; None if every process has whole gradients.
        fp8: the backend and recipes of fp8; without them no layer is converted, and the model computes in bf16.
        parameter_dtype: the dtype of all parameters and buffers of prepared models, instead of mixed precision.
        has_bf16: whether the device computes in bfloat16; it overrides the table of devices.

    Raises:
        SettingError: the device can't compute in that precision.
        MissingDependency: no package for fp8 is installed.
    """
    if parameter_dtype is not None:
        return TruePrecision(parameter_dtype, device_type, autocast_handler)
    if label == "no":
        return FullPrecision()
    if label == "bf16":
        if not (kind_of(device_type).supports_bf16() if has_bf16 is None else has_bf16):
            raise SettingError(
                f"mixed_precision='bf16': this {device_type} device can't compute in bfloat16. Use 'fp16' or 'no'."
            )
        return AutocastPrecision("bf16", device_type, handler=autocast_handler)
    if label == "fp16":
        kwargs = scaler_handler.to_kwargs() if scaler_handler else {}
        scaler = (
            torch.amp.GradScaler(device_type, **kwargs) if shards_over is None else ShardedScaler(shards_over, **kwargs)
        )
        return AutocastPrecision("fp16", device_type, scaler=scaler, handler=autocast_handler)
    if label == "fp8":
        if fp8 is None:
            return AutocastPrecision("bf16", device_type, handler=autocast_handler)
        return _fp8(fp8, device_type, autocast_handler)
    raise SettingError(f"mixed_precision={label!r}: choose one of 'no', 'fp16', 'bf16', 'fp8'.")


def _fp8(request: Fp8Request, device_type: str, handler: AutocastKwargs | None) -> Precision:
    """Return the fp8 precision for ``request`` on ``device_type``.

    Raises:
        SettingError: the backend doesn't support this device.
        NotBuilt: the backend is MS-AMP.
        MissingDependency: the backend isn't installed.
    """
    backend = choose_backend(request)
    recipe = request.recipes.get(backend)
    if backend == "AO":
        from ..plugins.fp8 import AORecipeKwargs
        from .fp8_ao import AoPrecision

        recipe = recipe or AORecipeKwargs()
        return AoPrecision(device_type, recipe, request.functions, gathers=request.gathers, handler=handler)
    if backend not in kind_of(device_type).fp8_backends.split():
        raise SettingError(
            f"fp8 by {package_of(backend)} doesn't compute on {device_type}, where this process does. Use torchao "
            "(ACCELERATE_FP8_BACKEND=AO, or AORecipeKwargs()), or mixed_precision='bf16'."
        )
    from .fp8_te import TePrecision

    recipe = recipe or request.functions("TERecipeKwargs")()
    return TePrecision(device_type, recipe, request.functions, handler=handler)


def scaler_of_shards(scaler: torch.amp.GradScaler | None, world: World) -> torch.amp.GradScaler | None:
    """Return a scaler like ``scaler`` for sharded gradients: an overflow on one rank skips the step on all.

    A scaler of another class than torch's is returned unchanged.
    """
    if type(scaler) is not torch.amp.GradScaler or world.backend is None:
        return scaler
    return ShardedScaler(
        world,
        init_scale=scaler.get_scale() if scaler.is_enabled() else 1.0,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


def get_grad_scaler(distributed_type: object = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a new gradient scaler for this process's device (FSDP1's sharded one if ``distributed_type`` is FSDP)."""
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    world = current_world()
    return torch.amp.GradScaler(available_kind().name if world is None else world.device.type, **kwargs)


@final
class ShardedScaler(torch.amp.GradScaler):
    """A gradient scaler that unscales each rank's shards, and makes all ranks step or skip together."""

    def __init__(self, world: World, **kwargs: Any) -> None:
        super().__init__(world.device.type, **kwargs)
        self._world = world

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in _own_gradients(optimizer):
            if gradient.dtype is torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients: the trainable parameters are float16. Load them in float32; "
                    "mixed_precision='fp16' computes in float16 all the same."
                )
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = found_inf.to(self._world.device, copy=True)
        with torch.no_grad():
            for (device, _), gradients in by_kind.items():
                here = found_inf.to(device, copy=True)
                unscale_each(gradients, here, inv_scale.to(device))
                found = torch.maximum(found, here.to(found.device))
            if self._world.backend is not None:
                dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found}

    def __reduce__(self) -> NoReturn:
        raise TypeError("The gradient scaler belongs to this run's processes. Save scaler.state_dict() instead.")


def _own_gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient: Any = parameter.grad
            if gradient is not None:
                yield gradient.to_local() if is_sharded(gradient) else gradient
