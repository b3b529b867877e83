"""Replicas of several ranks that survive lost ranks: each shards its copy of the model."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from ...distributed.mesh import Mesh
from ...distributed.world import World
from ...modules import is_sharded
from ...parallel.base import StrategyOptions
from ...parallel.fsdp.fsdp2 import FullyShardStrategy
from ...precision import Precision
from .launcher_members import SHARDING_AXES
from .strategy import Kept, refuse


@final
class KeptShards(Kept, FullyShardStrategy):
    """One replica for the ranks of a process group; a lost rank takes its replica along."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        refuse(options, "replicas that survive the loss of a rank are sharded by FSDP 2", "fsdp", "parallelism")
        super().__init__(world, options)
        self.retry = None
        whole = self.mesh
        self._num_readers = whole.data_share().count
        shards, sequences, layers = (whole.size(axis) for axis in SHARDING_AXES)
        self.mesh = Mesh.of(self.world, dp_shard=shards, cp=sequences, tp=layers)  # of the replica
        self._membership.num_copies = self.mesh.size("cp", "tp")

    @property
    def data_parallel_size(self) -> int:
        """The number of different micro-batches that the ranks of all replicas compute at the same time."""
        return self._num_readers

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Shard ``model`` over the replica, with the values of the lowest member."""
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
        """Return this rank's shard; a parameter that FSDP ignores is whole."""
        sharded: Any = tensor
        return sharded.to_local() if is_sharded(tensor) else tensor
