"""Parameters sharded by FSDP 2 over ranks that compute the parts of an update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from ...distributed.mesh import DATA_AXES, TOKEN_AXES
from ...distributed.world import World
from ...errors import PreparationError
from ...parallel.base import Clipping, StrategyOptions
from ...parallel.fsdp.fsdp2 import FullyShardStrategy
from ...precision import Precision
from .sharded import PartSharding

#: Along these, ranks compute tokens of the same samples.
_TOKENS = tuple(axis for axis in TOKEN_AXES if axis not in DATA_AXES)


@final
class PartShards(PartSharding, FullyShardStrategy):
    """FSDP 2 whose gradients are summed in the order of the parts, after each of them."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        if self.mesh.active("ep"):
            raise PreparationError(
                "ep with batch_parts isn't built: an expert computes tokens of several parts at once, so the order of "
                "their sums depends on the number of ranks. Leave it out, or batch_parts."
            )

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` sharded; its gradients are summed in the order of the parts."""
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if evaluation_mode:
            return placed
        if self._replicas:
            raise PreparationError("Parameters that FSDP ignores aren't summed in the order of the parts. Shard them.")
        self.sum_parts_of(placed, self.shard_mesh(), self.mesh.size(*_TOKENS))
        self.parts.take_model(placed)
        sequences = self.mesh.active(*_TOKENS)
        if sequences and self.parts.has_statistics:
            raise PreparationError(
                f"BatchNorm under {', '.join(sequences)} with batch_parts isn't built: each rank normalises over its "
                "own tokens of a part. Use LayerNorm, or leave batch_parts out."
            )
        return placed

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes reduce gradients as elsewhere: each is one part's."""
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss``; at the end of the window they are those of all parts.

        Args:
            num_steps: the micro-batches of an update on this rank, if the loss is a mean; None if it is a sum.
        """
        with self.next_part():
            num_parts = 1 if num_steps is None else num_steps * self.mesh.size(*TOKEN_AXES)
            super().backward(loss, scaler, num_parts, **kwargs)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; return the norm before scaling."""
        self._require_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.world.device)
        return self.scale(gradients, self.norm_of(gradients, clipping.norm_type, self.shard_mesh()), clipping)
