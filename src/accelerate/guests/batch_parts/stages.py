"""Pipeline stages, sharded by FSDP 2 over ranks that compute the parts of an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist

from ...distributed.mesh import DATA_AXES
from ...errors import PreparationError
from ...parallel.base import Clipping
from ...parallel.pipeline.strategy import PipelinedModel, PipelineStrategy
from ...precision import Precision
from .fixed_order import norm_of_norms
from .sharded import PartSharding
from .statistics import has_statistics


@final
class PartStages(PartSharding, PipelineStrategy):
    """Stages whose gradients are summed in the order of the parts. All stages compute one part, in micro-batches."""

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return the stages of ``model`` on this rank; their gradients are summed in the order of the parts."""
        if has_statistics(model):
            raise PreparationError(
                "BatchNorm in a pipeline with batch_parts isn't built: it normalises over a micro-batch of a part. Use "
                "LayerNorm, or leave batch_parts out."
            )
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if isinstance(placed, PipelinedModel) and placed is not model and not evaluation_mode:
            shared = {parameter for name, parameter in placed.named_parameters() if name in placed.shared}
            for stage in placed.pipeline_schedule.stages.values():
                self.sum_parts_of(stage, self.shard_mesh(), shared=shared)
            self.parts.take_model(placed)
        return placed

    def pipeline_step(
        self, model: Any, *args: Any, num_steps: float, synchronises: bool, **options: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of a part on every stage; at the end of an update they are those of all parts."""
        with self.next_part():
            num_parts = num_steps * self.mesh.size(*DATA_AXES)
            loss = super().pipeline_step(model, *args, num_steps=num_parts, synchronises=synchronises, **options)
            if not synchronises:
                model.pipeline_schedule.reduce()
        return loss

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a norm over all stages; a collective of the pipeline."""
        counted = [p.grad for p in parameters if p.grad is not None and p not in self._shared]
        own = torch.zeros((), device=self.world.device)
        if counted:
            own = self.norm_of(counted, clipping.norm_type, self.shard_mesh())
        of_stages = [torch.empty_like(own) for _ in range(self.mesh.size("pp"))]
        dist.all_gather(of_stages, own, group=self.mesh.group("pp"))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return self.scale(gradients, norm_of_norms(torch.stack(of_stages), clipping.norm_type), clipping)
