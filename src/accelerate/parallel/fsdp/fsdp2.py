"""Parameters, gradients and optimizer state sharded by torch's ``fully_shard`` (FSDP 2).

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023. Works on CPU ranks too.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Any, Final, final
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from ...distributed.mesh import SHARD_AXES, TOKEN_AXES
from ...distributed.world import World
from ...errors import PreparationError
from ...modules import is_sharded
from ...precision import Precision
from ...torch_private.distributed import concatenated
from ...torch_private.fsdp import sharded_parameters
from ..base import PreparedArguments, Role, StrategyOptions
from ..compile import compile_model, compile_regions_fsdp2, uncompiled
from ..context_parallel import prepare_attention
from ..expert_parallel import shard_experts
from ..rebind import compile_like_given, inner_optimizer
from ..replicas import ReplicaGradients
from ..sharded_strategy import ShardedState, ShardedStrategy
from ..state import ModelState
from ..tensor_parallel import parallelize
from .setup import (
    FSDPStrategy,
    attach_statistics,
    average_ignored,
    broadcast_from_main,
    broadcast_statistics,
    move_unit,
    refuse_old_torch,
    replicate_unsharded,
    set_mixed_precision,
    store_packed,
)
from .wrapping import find_ignored, find_wrap_units

#: The models that this module sharded; the gradients of their ignored parameters are averaged since then.
_own: Final[WeakSet[torch.nn.Module]] = WeakSet()


class FullyShardStrategy(FSDPStrategy, ShardedStrategy, ABC):
    """Parameters sharded over the ranks; each wrap unit is gathered while it computes."""

    can_repeat_passes = True
    sharding_function = "fsdp2_prepare_model"

    def __init__(self, world: World, options: StrategyOptions) -> None:
        refuse_old_torch(world.device)
        super().__init__(world, options)
        self._shards: DeviceMesh | None = None

    def adopts(self, model: torch.nn.Module) -> bool:
        """Return True if all of ``model`` came under ``fully_shard``; then it isn't sharded again."""
        return _is_placed(model)

    def has_sharded(self, model: torch.nn.Module) -> bool:
        """Return True if this strategy called ``fully_shard`` on ``model``."""
        return uncompiled(model) in _own

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if there is more than one model to shard, or a model and its optimizer don't come together."""
        super().check(arguments)
        fresh = [argument.current for argument in arguments.of(Role.MODEL) if not _is_placed(argument.current)]
        if len(fresh) > 1:
            raise PreparationError(
                f"prepare() got {len(fresh)} models. Only one model is supported at a time when using FSDP2: call "
                "prepare(model, optimizer) once for each."
            )
        optimizers = [inner_optimizer(argument.current) for argument in arguments.of(Role.OPTIMIZER)]
        self._use_shards(optimizers)
        loose = [optimizer for optimizer in optimizers if not _trains_any_of(optimizer, fresh)]
        trains = any(parameter.requires_grad for model in fresh for parameter in model.parameters())
        if loose or (trains and not optimizers):
            missing = "its model" if loose else "its optimizer"
            raise PreparationError(
                f"prepare() got {'an optimizer' if loose else 'a model'} without {missing}. When using FSDP2, a model "
                "and optimizer must be passed together to `Accelerator.prepare()`, as the optimizer needs to have its "
                "parameters replaced when the model is sharded. For evaluation only, use "
                "prepare_model(model, evaluation_mode=True)."
            )

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Cast ``model``, add activation checkpointing, compile and shard it, in this order."""
        given, model = model, self.unwrap(model, keep_torch_compile=False)
        if evaluation_mode or isinstance(model, FSDPModule):
            if not evaluation_mode and model not in _own:
                self.recompute(model)
                self._train_in_place(model)
            return super().place_model(given, precision, device_placement, evaluation_mode=True)
        plugin = self.plugin
        model = precision.convert(model)
        set_mixed_precision(plugin, model, precision)
        parallelism = self.options.plugins.parallelism
        parallelize(model, self.mesh, parallelism)
        if self.shards_attention:
            prepare_attention(model, self.mesh)
        experts = shard_experts(model, self.mesh, parallelism)
        if plugin.cpu_ram_efficient_loading:
            broadcast_statistics(model, self.world)
        store_packed(model, getattr(plugin.mixed_precision_policy, "param_dtype", None))
        plugin.set_auto_wrap_policy(model)
        ignored = find_ignored(plugin.ignored_modules, model)
        units = find_wrap_units(model, plugin.auto_wrap_policy, ignored)
        self.recompute(model, units)
        precision.patch_forward(model)
        self._compile_regions(model)
        units = [*experts, *(unit for unit in units if unit not in experts)]
        self._shard(model, units, ignored, experts, keeps_outputs=precision.is_autocast)
        precision.patch_wrapped(model)
        return compile_model(compile_like_given(given, model), self.options.plugins.dynamo)

    def _compile_regions(self, model: torch.nn.Module) -> None:
        dynamo = self.options.plugins.dynamo
        if dynamo is not None and dynamo.use_regional_compilation and str(dynamo.backend) != "NO":
            compile_regions_fsdp2(model, **dynamo.to_kwargs())

    def _shard(
        self,
        model: torch.nn.Module,
        units: list[torch.nn.Module],
        ignored: list[torch.nn.Module],
        experts: list[torch.nn.Module],
        *,
        keeps_outputs: bool,
    ) -> None:
        """Shard ``units``, then the rest of ``model``; broadcast the unsharded tensors on the device.

        Args:
            keeps_outputs: the model's own forward has decided the dtype of its outputs.
        """
        plugin, mesh = self.plugin, self.shard_mesh()
        left_out, own_mesh = self._unsharded_experts(experts)
        units = [unit for unit in units if unit not in left_out]
        ignored_parameters = {parameter for module in [*ignored, *left_out] for parameter in module.parameters()}
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload}
        if plugin.mixed_precision_policy is not None:
            options["mp_policy"] = plugin.mixed_precision_policy
        if ignored_parameters:
            options["ignored_params"] = ignored_parameters
        sends = plugin.cpu_ram_efficient_loading
        for unit in [*units, model]:
            if sends:  # unit by unit, so that only rank 0 ever has the full model
                broadcast_from_main(model, unit, self.world)
                if ignored_parameters:
                    ignored_parameters |= {p for module in ignored for p in module.parameters()}
            move_unit(unit, self.world.device)
            # By torch's default the root isn't resharded after forward.
            if unit is not model or not plugin.reshard_after_forward:
                options["reshard_after_forward"] = plugin.reshard_after_forward
            else:
                options.pop("reshard_after_forward", None)
            if unit is model and keeps_outputs and "mp_policy" in options:
                options["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
            fully_shard(unit, **{**options, "mesh": own_mesh} if unit in experts else options)
        _own.add(model)
        self._keep_units(model)
        attach_statistics(model)
        replicate_unsharded(model, mesh, self.world)
        self._average_ignored(model, ignored)
        others = [axis for axis in TOKEN_AXES if axis != "ep"]  # over which otherwise unsharded experts are replicated
        group, size = self.mesh.group(*others), self.mesh.size(*others)
        if group is not None:
            average_ignored(left_out, group, size, self._reduces(model))
        if callable(getattr(model, "generate", None)):
            register_fsdp_forward_method(model, "generate")

    def _average_ignored(self, model: torch.nn.Module, ignored: list[torch.nn.Module]) -> None:
        """Average the gradients of ``ignored`` over the ranks, because ``fully_shard`` doesn't."""
        reduces = self._reduces(model)
        modules = [module for one in ignored for module in one.modules()]
        sparse = [module for module in modules if getattr(module, "sparse", False)]
        average_ignored(sparse, None, self.world.size, reduces)
        trained = {id(p) for module in modules for p in module.parameters(recurse=False) if p.requires_grad}
        trained -= {id(p) for module in sparse for p in module.parameters()}
        named = {name: p for name, p in model.named_parameters() if id(p) in trained}
        if named:
            self._replicas.append(ReplicaGradients(model, named, sharded_parameters(model), self.mesh, reduces))

    def _unsharded_experts(self, experts: list[torch.nn.Module]) -> tuple[list[torch.nn.Module], DeviceMesh | None]:
        """Return the ``experts`` without another shard axis (all or none), and the mesh that shards the others."""
        axes = [axis for axis in SHARD_AXES if axis != "ep"]
        if not experts or not self.mesh.active(*axes):
            return experts, None
        shards = self.mesh.flat("dp_shard_cp_of_experts", *axes)
        if self.mesh.active("dp_replicate"):
            shards = self._replicated(shards)
        return [], shards

    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh for ``fully_shard``: its last axis shards parameters, a first of two replicates shards."""
        if self._shards is None:
            if self.mesh.size(*SHARD_AXES) == 1:  # nothing was said: all ranks shard
                self._shards = init_device_mesh(
                    self.world.device.type, (self.world.size,), mesh_dim_names=("dp_shard",)
                )
            else:
                self._shards = self.mesh.flat("dp_shard_cp", *SHARD_AXES)
                if self.mesh.active("dp_replicate"):
                    self._shards = self._replicated(self._shards)
        return self._shards

    def _replicated(self, shards: DeviceMesh) -> DeviceMesh:
        """Return ``shards`` with the replicating axis in front."""
        return concatenated([self.mesh.over("dp_replicate"), shards], self.mesh.device_mesh)

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[FullyShardStrategy]:
        """The state of models under ``fully_shard``."""
        return _FullyShardedState(self)


@final
class FullyShard(FullyShardStrategy):
    """Gradients are averaged by torch's reduce-scatter."""


@final
class _FullyShardedState(ShardedState[FullyShardStrategy]):
    """The state of models under ``fully_shard``, whose gradients may be unsharded during accumulation."""


def _is_placed(model: torch.nn.Module) -> bool:
    return isinstance(uncompiled(model), FSDPModule)


def _trains_any_of(optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> bool:
    """Return True if the optimizer has parameters of ``models``, or parameters that are sharded already."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}
    return any(id(p) in ours or is_sharded(p) for group in optimizer.param_groups for p in group["params"])
