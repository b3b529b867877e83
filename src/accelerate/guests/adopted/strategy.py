"""Models sharded before ``prepare``: they are trained in their layout, on the mesh of their DTensors.

They were sharded by the user's own ``fully_shard`` and ``parallelize_module``, or by transformers'
``from_pretrained(..., distributed_config=...)``. Works on CPU ranks too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import final

import torch
from torch.distributed.fsdp import FSDPModule

from ...errors import SettingError
from ...modules import is_sharded, move_tensor
from ...parallel.base import PreparedArguments, Role
from ...parallel.ddp import replica_in
from ...parallel.fsdp.setup import refuse_old_torch
from ...parallel.rebind import disable_foreach_across_meshes, inner_optimizer
from ...parallel.sharded_strategy import ShardedState, ShardedStrategy
from ...parallel.state import ModelState
from ...precision import Precision


@final
class Adopted(ShardedStrategy):
    """The strategy for models in their own layout: sharded, or replicated beside sharded ones."""

    def adopts(self, model: torch.nn.Module) -> bool:
        """Return True."""
        return True

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if a model that has to come sharded isn't, or if this torch can't train its shards."""
        super().check(arguments)
        for argument in arguments.of(Role.MODEL):
            self._refuse_unfit(argument.current)

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` cast, with equal replicas (unless ``evaluation_mode``), and compiled."""
        if not evaluation_mode:
            self._refuse_unfit(model)
        if device_placement:
            for tensor in [*model.parameters(), *model.buffers()]:
                if not is_sharded(tensor) and not tensor.is_meta:
                    move_tensor(tensor, self.world.device)
        return super().place_model(model, precision, device_placement, evaluation_mode)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the replicas of ``model`` equal, and average the gradients that ``fully_shard`` doesn't reduce."""
        if replica_in(model) is None:
            self._train_in_place(model)
        return model

    def _refuse_unfit(self, model: torch.nn.Module) -> None:
        """Raise if torch can't train ``model`` here, or if it isn't sharded and only an engine could shard it.

        Raises:
            MissingDependency: the version of torch for ``fully_shard`` on CPU ranks.
            SettingError: the axis, and the engine that shards over it.
        """
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            refuse_old_torch(self.world.device)
        if self.mesh_source != "ParallelismConfig" or not any(
            parameter.requires_grad for parameter in model.parameters()
        ):
            return
        axis = next(iter(self.mesh.active("dp_shard", "tp")), None)
        if axis is None or any(map(is_sharded, model.parameters())):
            return
        says = f"{axis}_size={self.mesh.size(axis)}"
        beside = " beside other axes" if axis == "tp" else " shards the model, which"
        way_out = "give all processes to one of them" if axis == "tp" else "set dp_shard_size=1"
        raise SettingError(
            f"{says}{beside} takes FSDP2: give Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
            f", or {way_out} ({self.mesh.equation()}). Without it {type(model).__name__} has to come sharded, by "
            "fully_shard or from_pretrained(..., distributed_config=...)."
        )

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Set ``foreach=False`` on ``optimizer`` where its parameters lie on different meshes."""
        super().register_step_hooks(optimizer)
        disable_foreach_across_meshes(inner_optimizer(optimizer))

    # -- training ------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes don't reduce gradients."""
        replica = replica_in(model)
        return super().no_sync(model) if replica is None else replica.no_sync()

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[Adopted]:
        """The state of models, some of which are sharded."""
        return _AdoptedState(self)


@final
class _AdoptedState(ShardedState[Adopted]):
    """The state of models that came sharded; it is saved in shards unless the FSDP plugin says otherwise."""

    prefers_shards = True
