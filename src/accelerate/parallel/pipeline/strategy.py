"""Pipeline parallelism: layers split into stages over ranks, with torch's schedules (GPipe, 1F1B, interleaved).

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021. Replicas of the pipeline average their gradients once an update.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Final, final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import MissingDependency, NotBuilt, PreparationError, SettingError
from ...modules import move_in_place
from ...plugins.fsdp import FullyShardedDataParallelPlugin
from ...plugins.handlers import ActivationCheckpointing
from ...plugins.parallelism import PipelineParallelConfig
from ...precision import Precision
from ...settings.labels import DistributedType, DynamoBackend
from ...training.oom_retry import Retryable, RetryMode
from ...training.open_window import GradientHolder
from ...training.recompute import chosen_modules, recompute_activations
from ...versions import is_torch_version
from ..base import Clipping, PreparedArguments, Role, Strategy, StrategyOptions
from ..compile import compile_model, compile_regions_fsdp2
from ..fsdp.setup import broadcast_from_main, set_mixed_precision
from ..fsdp.wrapping import find_wrap_units
from ..gradient_norm import by_device_and_dtype, local_tensor, norm_dtype, scale_to, shard_and_groups, total_norm
from ..gradients import ShardedGradients
from ..matrix_optimizer import step_on_whole_matrices
from ..rebind import parameters_by_name
from ..replicas import broadcast
from ..state import ModelState
from ..tensor_parallel import parallelize, placements_of
from .partition import Stage, choose_split_points, drop_other_stages, split_into_stages
from .schedule import LossFunction, PipelineSchedule, broadcast_object, shard_stage
from .state import StageAccess

#: The first torch whose schedules needn't return outputs; those of 2.6 can't evaluate either.
OLDEST_TORCH: Final = "2.10.0"
#: Axes that can't be combined with a pipeline, and the alternative.
_NOT_COMBINED = {
    "cp": "Longer sequences fit with tp_size and a plan that shards activations along the sequence",
    "sp": "Longer sequences fit with tp_size and a plan that shards activations along the sequence",
    "ep": "Experts are sharded like any other layer with dp_shard_size",
}


@final
class PipelinedModel(nn.Module):
    """A model with some stages on this rank; the parameters of the other stages are on the meta device.

    Train it with ``accelerator.pipeline_step``. A call returns the same output on every rank, without gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        pipeline_schedule: PipelineSchedule,
        owners: dict[str, tuple[int, ...]],
        shared: dict[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        # Not a child: parameter names are the user's own, and parameters of other stages are left out.
        self.__dict__["module"] = module
        self.__dict__["pipeline_schedule"] = pipeline_schedule
        self.__dict__["owners"] = owners  # name of a parameter or buffer -> its pipeline ranks
        self.__dict__["shared"] = shared  # name of a trained parameter of several ranks -> its local shape
        self.training: bool = module.training

    def forward(self, *inputs: object) -> Any:
        """Return the output of the full model, on every rank.

        Raises:
            PreparationError: gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise PreparationError(
                f"{type(self.module).__name__} is spread over the stages of a pipeline, so a loss computed from its "
                "output has no gradients. Train with `loss = accelerator.pipeline_step(model, (inputs, targets), "
                "loss_function)`, or call the model under torch.no_grad()."
            )
        return self.pipeline_schedule.evaluate(inputs, training=self.training)

    def train(self, mode: bool = True) -> PipelinedModel:
        """Set training mode, as for any module."""
        self.training = mode
        self.module.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over this rank's parameters, under the names of the user's own model."""
        found = self.module.named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in found if not parameter.is_meta)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over this rank's buffers."""
        found = self.module.named_buffers(prefix, recurse, remove_duplicate)
        return ((name, buffer) for name, buffer in found if not buffer.is_meta)

    def state_dict(self, *args: object, **kwargs: Any) -> Any:
        """Return the state dict of the user's own model; tensors of other ranks are on the meta device."""
        return self.module.state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["module"], name)
        return self._generating(found) if name == "generate" and inspect.ismethod(found) else found

    def _generating(self, method: MethodType) -> MethodType:
        """Bind ``method`` of the user's own model to this module, so that it calls all stages.

        Raises:
            PreparationError: it is transformers' method, which passes caches between calls.
        """
        if method.__func__.__module__.startswith("transformers."):
            raise PreparationError(
                f"{type(self.module).__name__}.generate() keeps a cache of all layers, which are spread over the "
                "stages of a pipeline here. Generate with the whole model: `state = accelerator.get_state_dict(model)` "
                "on all ranks, then, on the main one, `whole = type(model)(model.config); whole.load_state_dict(state)`"
                "; or accelerator.save_model(model, folder) and from_pretrained(folder)."
            )
        return MethodType(method.__func__, self)


class PipelineStrategy(Strategy, ABC):
    """Layers split into stages, some on each rank; a batch passes through them in micro-batches."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        if not is_torch_version(">=", OLDEST_TORCH):
            raise MissingDependency(
                f"Pipeline parallelism (pp_size) needs the schedules of torch {OLDEST_TORCH} or newer, installed is "
                f"{torch.__version__}. Install a newer torch, or set pp_size=1 and shard the "
                "model with tp_size or FSDP."
            )
        super().__init__(world, options)
        self.retry = Retryable(world, RetryMode.NEVER)
        combined = self.mesh.active(*_NOT_COMBINED)
        if combined:
            raise NotBuilt(
                f"ParallelismConfig(pp_size={self.mesh.size('pp')}, {combined[0]}_size={self.mesh.size(combined[0])}): "
                f"pipelines are combined with dp_replicate_size, dp_shard_size and tp_size ({self.mesh.equation()}). "
                f"{_NOT_COMBINED[combined[0]]}, or set pp_size=1."
            )
        #: Whether stages are sharded.
        self.shards: bool = options.plugins.fsdp is not None
        # Parameters that an earlier pipeline rank also has; their gradients count once in a norm.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def label(self) -> DistributedType:
        """The distributed type: FSDP if stages are sharded, else that of the device: MULTI_CPU, MULTI_GPU, ...."""
        return DistributedType.FSDP if self.shards else super().label

    @property
    def config(self) -> PipelineParallelConfig:
        """The PipelineParallelConfig, with split points and schedule."""
        plugin = self.options.plugins.parallelism
        return getattr(plugin, "pp_handler", None) or PipelineParallelConfig()

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if stages are sharded and the optimizer doesn't come with its model."""
        super().check(arguments)
        given = (argument.current for argument in arguments.of(Role.MODEL))
        models = [model for model in given if not isinstance(model, PipelinedModel)]
        if self.shards and models and not any(True for _ in arguments.of(Role.OPTIMIZER)):
            raise PreparationError(
                f"prepare() got a {type(models[0]).__name__} without its optimizer. Stages in shards "
                f"({self.mesh.equation()}) have new parameters: call prepare(model, optimizer) with both."
            )

    def place_model(
        self, model: nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> nn.Module:
        """Split ``model`` into stages and keep this rank's ones, cast and on its device."""
        if isinstance(model, PipelinedModel):
            return model
        plugin = self.options.plugins.fsdp
        model = precision.convert(model)
        if plugin is not None:
            self._prepare_for_sharding(plugin, model, precision)
        stages = self._stages(model)
        self._apply_tensor_parallel(model, stages)
        ranks, place = self.mesh.size("pp"), self.mesh.place("pp")
        owners = _owners(model, stages, ranks)
        mine = {number: stage for number, stage in enumerate(stages) if number % ranks == place}
        kept = {id(tensor) for stage in mine.values() for tensor in _tensors(stage)}
        if place == 0:  # the first rank also keeps tensors that no stage uses
            used = {id(tensor) for stage in stages for tensor in _tensors(stage)}
            kept |= {id(tensor) for tensor in _tensors(model)} - used
        drop_other_stages(model, kept)
        if self.options.plugins.recompute is not None:
            self._recompute_chosen(mine, model, self.options.plugins.recompute)
        for number, stage in mine.items():
            move_in_place(stage, self.world.device)
            if self.mesh.active("dp_replicate"):
                for tensor in {id(tensor): tensor for tensor in _tensors(stage)}.values():
                    broadcast(local_tensor(tensor.detach()), self.mesh.group("dp_replicate"), self.world.device)
            _apply_precision(precision, stage, is_last=number == len(stages) - 1)
        dynamo = self.options.plugins.dynamo
        if dynamo is not None and self.shards and dynamo.backend != DynamoBackend.NO:
            for stage in mine.values():  # in place, because the stage itself is sharded
                compile_regions_fsdp2(stage, **dynamo.to_kwargs())
        elif dynamo is not None:
            mine = {number: compile_model(stage, dynamo) for number, stage in mine.items()}
        if self.shards:
            self._shard(mine, model, precision)
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and owners[name][0] != place:
                self._shared[parameter] = True
        pipeline_schedule = PipelineSchedule(self.world, self.mesh, self.config, len(stages), mine)
        return PipelinedModel(model, pipeline_schedule, owners, self._shapes_of_shared(model, owners))

    def _recompute_chosen(self, mine: Mapping[int, Stage], model: nn.Module, options: ActivationCheckpointing) -> None:
        """Add activation checkpointing to the chosen modules; to whole stages if the model was exported."""
        chosen = chosen_modules(model, options)
        for stage in mine.values():
            own = set(stage.modules())
            inside = [module for module in chosen if module in own] if stage.is_symbolic else [stage]
            recompute_activations(inside, offload=options.offload, save_ops=options.save_ops)

    def _shapes_of_shared(self, model: nn.Module, owners: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the local shapes of trained parameters that several stages use; a collective."""
        found: dict[str, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            if len(owners[name]) > 1 and parameter.requires_grad:
                own = None if parameter.is_meta else tuple(local_tensor(parameter).shape)
                found[name] = broadcast_object(own, self.mesh.ranks("pp")[owners[name][0]], self.mesh.group("pp"))
        return found

    def _stages(self, model: nn.Module) -> list[Stage]:
        config = self.config
        num_stages = self.mesh.size("pp") * (config.stages_per_rank or 1)
        points = config.split_points or choose_split_points(model, num_stages)
        if len(points) != num_stages - 1:
            raise SettingError(
                f"PipelineParallelConfig(split_points={list(points)}) makes {len(points) + 1} stages, but pp_size="
                f"{self.mesh.size('pp')} with {config.stages_per_rank} stage(s) per rank takes {num_stages}. Name "
                f"{num_stages - 1} modules."
            )
        return split_into_stages(model, points, config.example_inputs)

    def _apply_tensor_parallel(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        """Shard the layers over the tensor-parallel ranks.

        Raises:
            PreparationError: the model was exported, so its stages don't use the model's own layers.
        """
        if self.mesh.size("tp") == 1:
            return
        if not all(stage.is_symbolic for stage in stages):
            raise PreparationError(
                f"pp_size={self.mesh.size('pp')} with tp_size={self.mesh.size('tp')}: the forward of "
                f"{type(model).__name__} had to be traced, and sizes of whole layers are written into a trace. Make it "
                "one that can be traced symbolically (its own code calls its blocks, without looking at values), or "
                "set tp_size=1."
            )
        parallelize(model, self.mesh, self.options.plugins.parallelism)

    def _prepare_for_sharding(
        self, plugin: FullyShardedDataParallelPlugin, model: nn.Module, precision: Precision
    ) -> None:
        """Configure ``plugin`` and ``model`` for sharding the stages."""
        if plugin.ignored_modules is not None:
            raise SettingError(
                f"FullyShardedDataParallelPlugin(ignored_modules={plugin.ignored_modules!r}) with pp_size="
                f"{self.mesh.size('pp')}: every parameter of a stage is sharded. Leave ignored_modules out."
            )
        if plugin.cpu_ram_efficient_loading:
            broadcast_from_main(model, model, self.world)
        set_mixed_precision(plugin, model, precision)

    def _shard(self, mine: Mapping[int, nn.Module], model: nn.Module, precision: Precision) -> None:
        plugin, mesh = self.options.plugins.fsdp, self.mesh
        assert plugin is not None  # `shards` says so
        plugin.set_auto_wrap_policy(model)
        units = find_wrap_units(model, plugin.auto_wrap_policy)
        for stage in mine.values():
            if plugin.activation_checkpointing and self.options.plugins.recompute is None:
                own = set(stage.modules())  # of a traced model, the units are in no stage
                inside = [unit for unit in units if unit in own] or [stage]
                recompute_activations(inside, offload=plugin.activation_checkpointing_offload)
            shard_stage(
                stage,
                model,
                units,
                plugin,
                self.shard_mesh(),
                mesh.within(*mesh.active("dp_replicate"), "dp_shard"),
                keeps_outputs=precision.is_autocast,
                reshards=self.config.reshard_between_parts,
            )

    def shard_mesh(self) -> DeviceMesh:
        """Return the mesh for ``fully_shard``: its last axis shards a stage, a first of two replicates shards."""
        return self.mesh.over(*self.mesh.active("dp_replicate"), "dp_shard")

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's model; in it, tensors of other ranks are on the meta device."""
        inner = model.module if isinstance(model, PipelinedModel) else model
        return super().unwrap(inner, keep_fp32_wrapper, keep_torch_compile)

    # -- training ------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float = 1, **kwargs: object
    ) -> None:
        """Raise: ``pipeline_step`` includes the backward pass."""
        raise PreparationError(
            "accelerator.backward(loss) under pipeline parallelism: forward and backward of several parts of the batch "
            "interleave, so both are in `loss = accelerator.pipeline_step(model, (inputs, targets), loss_function)`."
        )

    def pipeline_step(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: object,
        loss_function: LossFunction,
        *,
        scaler: torch.amp.GradScaler | None,
        num_steps: float,
        synchronises: bool,
    ) -> torch.Tensor:
        """Accumulate gradients on every stage, average them if the update is complete, and return the loss."""
        if not isinstance(model, PipelinedModel):
            raise PreparationError(
                f"pipeline_step() got a {type(model).__name__} that isn't spread over stages. Give it what "
                "accelerator.prepare(model, ...) returned."
            )
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.world.device))  # by every stage
        loss = model.pipeline_schedule.train(
            inputs, targets, loss_function, scale=scale / num_steps, training=model.training
        )
        if synchronises:
            self._reduce_gradients(model)
        return loss

    def _reduce_gradients(self, model: PipelinedModel) -> None:
        """Sum gradients of parameters that several stages use, and average all gradients over the replicas."""
        model.pipeline_schedule.reduce()
        stages = self.mesh.group("pp")
        named = dict(model.module.named_parameters())
        for name, shape in model.shared.items():
            parameter = named[name]
            total = torch.zeros(shape, dtype=parameter.dtype, device=self.world.device)
            if parameter.is_meta:
                dist.all_reduce(total, group=stages)
                continue
            parameter.grad = _gradient_placed_like(parameter)
            total.copy_(local_tensor(parameter.grad))
            dist.all_reduce(total, group=stages)
            local_tensor(parameter.grad).copy_(total)
        replicas = self.mesh.group("dp_replicate")
        # The reduction of shards averages them over the replicas.
        if replicas is None or self.shards or not self.averages_replicas:
            return
        own = (local_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
        for gradients in by_device_and_dtype(own).values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.mesh.size("dp_replicate"))
            dist.all_reduce(flat, group=replicas)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks that gather a stage's matrices for an optimizer of whole matrices."""
        step_on_whole_matrices(optimizer, self.world.device)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a norm over all stages; a collective of the pipeline."""
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        counted = [p.grad for p in parameters if p.grad is not None and p not in self._shared]
        # First within the stage, over the groups of its shards; then over all stages.
        of_stage = total_norm(map(shard_and_groups, counted), clipping.norm_type, self.world.device)
        norm = total_norm([(of_stage, (self.mesh.group("pp"),))], clipping.norm_type, self.world.device)
        norm = norm.to(norm_dtype(parameters))
        scale_to(gradients, norm, clipping.max_norm, clipping.error_if_nonfinite)
        return norm

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[PipelineStrategy]:
        """The state of models that are distributed over stages."""
        return _PipelineState(self)


@final
class Pipeline(PipelineStrategy):
    """Replicas average their gradients, and shards are reduced by torch's reduce-scatter."""


@final
class _PipelineState(ModelState[PipelineStrategy]):
    """The state of models that are distributed over stages; every rank has the part of its own stages."""

    def is_whole(self, model: nn.Module | None = None) -> bool:
        """Return False, because a rank has only its own stages."""
        return False

    def saved_model(self, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """Return the prepared model, because it knows the ranks of all tensors."""
        return prepared

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of all stages; those of other ranks are on the meta device."""
        return parameters_by_name(model.module if isinstance(model, PipelinedModel) else model)

    def full_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict on the main process, in CPU memory, and an empty one elsewhere; a collective."""
        if not isinstance(model, PipelinedModel):
            return super().full_state_dict(model, unwrap)
        return self.access.full_model_state(model, self.strategy.world.is_main)

    @property
    def access(self) -> StateAccess:
        """The access to the state of stages."""
        return StageAccess(self.strategy.mesh, self.strategy.world.device, self.named_parameters)

    @property
    def gradients(self) -> GradientHolder | None:
        """The gradients of this rank's stages, before they are summed over stages and averaged over replicas."""
        return ShardedGradients(self.layout, self.named_parameters, _stages_of)


def _tensors(stage: nn.Module) -> Iterator[torch.Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()


def _stages_of(model: nn.Module) -> list[nn.Module]:
    return list(model.pipeline_schedule.stages.values()) if isinstance(model, PipelinedModel) else []


def _owners(model: nn.Module, stages: Sequence[nn.Module], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the pipeline ranks of each parameter and buffer by name; the first rank if no stage uses it."""
    having: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for tensor in _tensors(stage):
            having.setdefault(id(tensor), set()).add(number % num_ranks)
    state = model.state_dict(keep_vars=True)
    return {name: tuple(sorted(having.get(id(tensor), {0}))) for name, tensor in state.items()}


def _gradient_placed_like(parameter: Any) -> torch.Tensor:
    """Return the gradient of ``parameter`` in the parameter's placements; zeros if it has none."""
    gradient = parameter.grad
    if gradient is None or placements_of(gradient) == placements_of(parameter):
        return torch.zeros_like(parameter) if gradient is None else gradient
    return gradient.redistribute(placements=parameter.placements)  # an embedding's, where ranks have part of the tokens


def _apply_precision(precision: Precision, stage: nn.Module, is_last: bool) -> None:
    """Make ``stage`` compute in ``precision``; only the last stage's outputs are cast back."""
    if is_last or not precision.is_autocast:
        precision.patch_forward(stage)
        return
    forward = stage.forward

    def under_autocast(*args: object) -> object:
        with precision.autocast():
            return forward(*args)

    stage.forward = under_autocast
