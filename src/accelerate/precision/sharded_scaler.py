"""Loss scaling of sharded gradients: an overflow on one rank counts on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, final

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from ..distributed.world import World
from ..torch_private.modules import unscale_each


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
            gradient = parameter.grad
            if gradient is not None:
                yield gradient.to_local() if isinstance(gradient, DTensor) else gradient
