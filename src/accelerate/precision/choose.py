"""Settings and a device, as a precision; and the scalers that go with them."""

from __future__ import annotations

from typing import Any

import torch

from ..devices import available_kind, kind_of
from ..errors import NotBuilt, SettingError
from ..world import World, current_world
from .autocast import AutocastPrecision
from .base import FullPrecision, Precision


def choose(
    label: str,
    device_type: str,
    *,
    autocast_handler: Any = None,
    scaler_handler: Any = None,
    shards_over: World | None = None,
) -> Precision:
    """The precision that ``label`` (no, fp16, bf16, fp8) means on ``device_type``.

    Args:
        shards_over: the processes over which gradients lie in pieces; None where each has them whole.

    Raises:
        SettingError: the device can't compute in that precision.
        NotBuilt: fp8.
    """
    if label == "no":
        return FullPrecision()
    if label == "bf16":
        _refuse_bf16_without_hardware(device_type)
        return AutocastPrecision("bf16", device_type, handler=autocast_handler)
    if label == "fp16":
        kwargs = scaler_handler.to_kwargs() if scaler_handler else {}
        scaler = make_scaler(device_type, **kwargs) if shards_over is None else _sharded(shards_over, kwargs)
        return AutocastPrecision("fp16", device_type, scaler=scaler, handler=autocast_handler)
    if label == "fp8":
        raise NotBuilt("mixed_precision='fp8' isn't built in this version. Use 'bf16' or 'fp16'.")
    raise SettingError(f"mixed_precision={label!r}: choose one of 'no', 'fp16', 'bf16', 'fp8'.")


def _refuse_bf16_without_hardware(device_type: str) -> None:
    if not kind_of(device_type).supports_bf16():
        raise SettingError(
            f"mixed_precision='bf16': this {device_type} device can't compute in bfloat16. Use 'fp16' or 'no'."
        )


def _sharded(world: World, kwargs: dict[str, Any]) -> Any:
    from .sharded_scaler import ShardedScaler  # imports torch's distributed tensors

    return ShardedScaler(world, **kwargs)


def make_scaler(device_type: str, **kwargs: Any) -> Any:
    """A gradient scaler for ``device_type``; the CPU has a real one."""
    return torch.amp.GradScaler(device_type, **kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """A gradient scaler for the device of this process (FSDP1's sharded one for ``distributed_type`` FSDP)."""
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    world = current_world()
    return make_scaler(available_kind().name if world is None else world.device.type, **kwargs)
