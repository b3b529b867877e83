"""Choose a precision, and its gradient scaler, from the settings and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..devices.table import available_kind, kind_of
from ..distributed.world import World, current_world
from ..errors import SettingError
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
        scaler = make_scaler(device_type, **kwargs) if shards_over is None else _sharded(shards_over, kwargs)
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


def _sharded(world: World, kwargs: dict[str, object]) -> torch.amp.GradScaler:
    from .sharded_scaler import ShardedScaler  # imports torch's distributed tensors

    return ShardedScaler(world, **kwargs)


def make_scaler(device_type: str, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a new gradient scaler for ``device_type``, also for the CPU."""
    return torch.amp.GradScaler(device_type, **kwargs)


def scaler_of_shards(scaler: torch.amp.GradScaler | None, world: World) -> torch.amp.GradScaler | None:
    """Return a scaler like ``scaler`` for sharded gradients: an overflow on one rank skips the step on all.

    A scaler of another class than torch's is returned unchanged.
    """
    if type(scaler) is not torch.amp.GradScaler or world.backend is None:
        return scaler
    options = {
        "init_scale": scaler.get_scale() if scaler.is_enabled() else 1.0,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }
    return _sharded(world, options)


def get_grad_scaler(distributed_type: object = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a new gradient scaler for this process's device (FSDP1's sharded one if ``distributed_type`` is FSDP)."""
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    world = current_world()
    return make_scaler(available_kind().name if world is None else world.device.type, **kwargs)
