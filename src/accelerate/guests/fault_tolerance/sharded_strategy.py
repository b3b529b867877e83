"""Replicas of several ranks that survive lost ranks: each shares out its copy of the model, by FSDP 2 or a pipeline."""

from __future__ import annotations

import math
from abc import ABC
from typing import Any, final

import torch
import torch.distributed as dist

from ...distributed.mesh import Mesh
from ...distributed.world import World
from ...modules import is_sharded
from ...parallel.base import StrategyOptions
from ...parallel.fsdp.fsdp2 import FullyShardStrategy
from ...parallel.pipeline.schedule import LossFunction
from ...parallel.pipeline.strategy import PipelineStrategy
from ...precision import Precision
from .launcher_members import REPLICA_AXES
from .strategy import Kept, refuse


class KeptParts(Kept, ABC):
    """One replica for the ranks of a process group; a lost rank takes its replica along."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        why = "replicas that survive the loss of a rank are sharded by FSDP 2 or are pipelines"
        refuse(options, why, "fsdp", "parallelism")
        super().__init__(world, options)
        self.retry = None
        whole = self.mesh
        self._num_readers = whole.data_share().count
        self.mesh = Mesh.of(self.world, None, **{axis: whole.size(axis) for axis in REPLICA_AXES})  # of the replica
        self._membership.num_copies, self._membership.num_stages = self.mesh.size("cp", "tp"), self.mesh.size("pp")

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that the ranks of all replicas compute at the same time."""
        return self._num_readers

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Share out ``model`` over the replica, with the values of the lowest member."""
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if not evaluation_mode:
            sharded: Any = [parameter for parameter in placed.parameters() if is_sharded(parameter)]
            self._membership.meshes |= {one.device_mesh.mesh_dim_names: one.device_mesh for one in sharded}
            self._begin(placed)
        return placed

    def _replica_weight(self) -> float:
        total = torch.tensor(self._weight, dtype=torch.float64, device=self.world.device)
        dist.all_reduce(total)
        return float(total) / self.world.size

    def _own_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard; a parameter that isn't sharded is whole."""
        sharded: Any = tensor
        return sharded.to_local() if is_sharded(tensor) else tensor


@final
class KeptShards(KeptParts, FullyShardStrategy):
    """Replicas that FSDP 2 shards."""


@final
class KeptPipeline(KeptParts, PipelineStrategy):
    """Replicas that are pipelines, with whole or sharded stages."""

    def pipeline_step(
        self,
        model: torch.nn.Module,
        inputs: tuple[Any, ...],
        targets: object,
        loss_function: LossFunction,
        *,
        scaler: torch.amp.GradScaler | None,
        num_steps: float,
        synchronises: bool,
    ) -> torch.Tensor:
        """Accumulate gradients on every stage; at the end of the window, average them over all its samples."""
        with self._micro_batch(None, has_scaler=scaler is not None) as factor:
            share = 1 / factor if factor else math.inf
            return super().pipeline_step(
                model, inputs, targets, loss_function, scaler=scaler, num_steps=share, synchronises=synchronises
            )
