"""Layers dealt to the ranks of a pipeline: torch's schedules (GPipe, 1F1B, interleaved) from a raw loop.

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021. Replicas of the pipeline average their gradients once an update.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..checkpointing.sharded import StateAccess
from ..errors import NotBuilt, PreparationError, SettingError
from ..plugins.pipeline import PipelineParallelConfig
from ..precision import Precision
from ..settings.labels import DistributedType, DynamoBackend
from ..world import World
from .base import Strategy
from .bundle import Bundle, Role
from .compile import compile_model, compile_regions_fsdp2
from .following import Stage
from .held_gradients import sharded_gradients, take_sharded_gradients
from .norms import clamp_pieces, own_piece, pieces, scale_to, total_norm
from .pipeline_state import OverStages
from .rebind import inner_optimizer, parameters_by_name
from .recompute import recompute_activations
from .shard_saving import gathered, saved_as
from .shard_setup import send_from_main, upcast_trainable
from .sharded_stages import shard_stage
from .stages import choose_points, drop_foreign, stages_of
from .tensor import parallelize, placements_of
from .timetable import LossFunction, Timetable, told
from .units import find_units

#: Axes that a pipeline has no stages for, and the way out.
_NOT_COMBINED = {
    "cp": "Longer sequences fit with tp_size and a plan that cuts activations along the sequence",
    "sp": "Longer sequences fit with tp_size and a plan that cuts activations along the sequence",
    "ep": "Experts are sharded like any other layer with dp_shard_size",
}


@final
class Pipelined(nn.Module):
    """A model of which this rank has some stages; the parameters of the others have a shape and no values.

    ``accelerator.pipeline_step`` trains it. Calling it computes, without gradients, the same output on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        timetable: Timetable,
        owners: dict[str, tuple[int, ...]],
        shared: dict[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        # Not a child: names of parameters are the user's own, and foreign ones are no part of this rank.
        self.__dict__["module"] = module
        self.__dict__["timetable"] = timetable
        self.__dict__["owners"] = owners  # by parameter and buffer, the ranks of the pipeline that have it
        self.__dict__["shared"] = shared  # by trained parameter of several ranks, the shape of a rank's piece
        self.training = module.training

    def forward(self, *inputs: Any) -> Any:
        """The output of the whole model, on every rank.

        Raises:
            PreparationError: gradients are wanted.
        """
        if torch.is_grad_enabled():
            raise PreparationError(
                f"{type(self.module).__name__} is spread over the stages of a pipeline, so a loss computed from its "
                "output has no gradients. Train with `loss = accelerator.pipeline_step(model, (inputs, targets), "
                "loss_function)`, or call the model under torch.no_grad()."
            )
        return self.timetable.evaluate(inputs, training=self.training)

    def train(self, mode: bool = True) -> Pipelined:
        """As any module's."""
        self.training = mode
        self.module.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that lie on this rank, under the names of the user's own model."""
        found = self.module.named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in found if not parameter.is_meta)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that lie on this rank."""
        found = self.module.named_buffers(prefix, recurse, remove_duplicate)
        return ((name, buffer) for name, buffer in found if not buffer.is_meta)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the user's own model, with tensors of other ranks on the meta device."""
        return self.module.state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["module"], name)
        return self._generating(found) if name == "generate" and inspect.ismethod(found) else found

    def _generating(self, method: Any) -> Any:
        """``method`` of the user's own model, which calls the model through all stages.

        Raises:
            PreparationError: it is the one of transformers, which hands caches from call to call.
        """
        if method.__func__.__module__.startswith("transformers."):
            raise PreparationError(
                f"{type(self.module).__name__}.generate() keeps a cache of all layers, which are spread over the "
                "stages of a pipeline here. Generate with the whole model: `state = accelerator.get_state_dict(model)` "
                "on all ranks, then, on the main one, `whole = type(model)(model.config); whole.load_state_dict(state)`"
                "; or accelerator.save_model(model, folder) and from_pretrained(folder)."
            )
        return MethodType(method.__func__, self)


@final
class Pipeline(Strategy):
    """Each rank has some of the layers; batches go through them in parts."""

    communicates_in_forward = holds_gradients = True

    def __init__(self, world: World, options: Any) -> None:
        super().__init__(world, options)
        combined = self.mesh.active(*_NOT_COMBINED)
        if combined:
            raise NotBuilt(
                f"ParallelismConfig(pp_size={self.mesh.size('pp')}, {combined[0]}_size={self.mesh.size(combined[0])}): "
                f"pipelines are combined with dp_replicate_size, dp_shard_size and tp_size ({self.mesh.equation()}). "
                f"{_NOT_COMBINED[combined[0]]}, or set pp_size=1."
            )
        #: Whether stages lie in shards.
        self.shards = options.plugins.get("fsdp_plugin") is not None
        # Parameters that an earlier rank of the pipeline has too: their gradients count once in a norm.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def label(self) -> DistributedType:
        """FSDP, where stages lie in shards; else MULTI_CPU, MULTI_GPU, ...: the vendor's word."""
        return DistributedType.FSDP if self.shards else DistributedType(self.world.kind.label)

    @property
    def config(self) -> PipelineParallelConfig:
        """How to split, and in which order to work."""
        plugin = self.options.plugins.get("parallelism_config")
        return getattr(plugin, "pp_handler", None) or PipelineParallelConfig()

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, bundle: Bundle) -> None:
        """Raises if an optimizer would be left with parameters that are cut into shards without it."""
        super().check(bundle)
        models = [slot.current for slot in bundle.of(Role.MODEL) if not isinstance(slot.current, Pipelined)]
        if self.shards and models and not any(True for _ in bundle.of(Role.OPTIMIZER)):
            raise PreparationError(
                f"prepare() got a {type(models[0]).__name__} without its optimizer. Stages in shards "
                f"({self.mesh.equation()}) have new parameters: call prepare(model, optimizer) with both."
            )

    def place_model(
        self, model: nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> nn.Module:
        """``model`` with this rank's stages on its device, in its precision, and nothing of the others."""
        if isinstance(model, Pipelined):
            return model
        plugin = self.options.plugins.get("fsdp_plugin")
        model = precision.convert(model)
        if plugin is not None:
            self._settle(plugin, model, precision)
        stages = self._stages(model)
        self._cut_layers(model, stages)
        ranks, place = self.mesh.size("pp"), self.mesh.place("pp")
        owners = _owners(model, stages, ranks)
        mine = {number: stage for number, stage in enumerate(stages) if number % ranks == place}
        kept = {id(tensor) for stage in mine.values() for tensor in _tensors(stage)}
        drop_foreign(model, kept)
        for number, stage in mine.items():
            _lay_on(stage, self.world.device)
            _make_equal(stage, self.mesh.within("dp_replicate"))
            _compute_in(precision, stage, is_last=number == len(stages) - 1)
        dynamo = self.options.dynamo_plugin
        if dynamo is not None and self.shards and dynamo.backend != DynamoBackend.NO:
            for stage in mine.values():  # in place: what is sharded is the stage itself
                compile_regions_fsdp2(stage, **dynamo.to_kwargs())
        elif dynamo is not None:
            mine = {number: compile_model(stage, dynamo) for number, stage in mine.items()}
        if self.shards:
            self._shard(mine, model, precision)
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and owners[name][0] != place:
                self._shared[parameter] = True
        timetable = Timetable(self.world, self.mesh, self.config, len(stages), mine)
        return Pipelined(model, timetable, owners, self._shared_pieces(model, owners))

    def _shared_pieces(self, model: nn.Module, owners: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes in which parameters that several stages have lie on each of their ranks; a collective."""
        found: dict[str, tuple[int, ...]] = {}
        for name, parameter in model.named_parameters():
            if len(owners[name]) > 1 and parameter.requires_grad:
                own = None if parameter.is_meta else tuple(own_piece(parameter).shape)
                found[name] = told(own, self.mesh.ranks("pp")[owners[name][0]], self.mesh.group("pp"))
        return found

    def _stages(self, model: nn.Module) -> list[Stage]:
        config = self.config
        num_stages = self.mesh.size("pp") * (config.stages_per_rank or 1)
        points = config.split_points or choose_points(model, num_stages)
        if len(points) != num_stages - 1:
            raise SettingError(
                f"PipelineParallelConfig(split_points={list(points)}) makes {len(points) + 1} stages, but pp_size="
                f"{self.mesh.size('pp')} with {config.stages_per_rank} stage(s) per rank takes {num_stages}. Name "
                f"{num_stages - 1} modules."
            )
        return stages_of(model, points, config.example_inputs)

    def _cut_layers(self, model: nn.Module, stages: Sequence[Stage]) -> None:
        """Layers are cut over the tensor-parallel ranks.

        Raises:
            PreparationError: the model had to be traced, so that its stages don't use the layers themselves.
        """
        if self.mesh.size("tp") == 1:
            return
        if not all(stage.is_followed for stage in stages):
            raise PreparationError(
                f"pp_size={self.mesh.size('pp')} with tp_size={self.mesh.size('tp')}: the forward of "
                f"{type(model).__name__} had to be traced, and sizes of whole layers are written into a trace. Make it "
                "one that can be followed (its own code calls its blocks, without looking at values), or set tp_size=1."
            )
        parallelize(model, self.mesh, self.options.plugins["parallelism_config"].tp_handler)

    def _settle(self, plugin: Any, model: nn.Module, precision: Precision) -> None:
        """``plugin`` and ``model`` are as sharding stages takes them."""
        if plugin.ignored_modules is not None:
            raise SettingError(
                f"FullyShardedDataParallelPlugin(ignored_modules={plugin.ignored_modules!r}) with pp_size="
                f"{self.mesh.size('pp')}: every parameter of a stage is sharded. Leave ignored_modules out."
            )
        if plugin.cpu_ram_efficient_loading:
            send_from_main(model, model, self.world)
        if precision.label != "no":
            plugin.set_mixed_precision(precision.label)
            upcast_trainable(model)

    def _shard(self, mine: Mapping[int, nn.Module], model: nn.Module, precision: Precision) -> None:
        plugin, mesh = self.options.plugins["fsdp_plugin"], self.mesh
        plugin.set_auto_wrap_policy(model)
        units = find_units(model, plugin.auto_wrap_policy)
        replicas = mesh.active("dp_replicate")
        for stage in mine.values():
            if plugin.activation_checkpointing:
                own = set(stage.modules())  # of a traced model, the units are in no stage
                inside = [unit for unit in units if unit in own] or [stage]
                recompute_activations(inside, offload=plugin.activation_checkpointing_offload)
            shard_stage(
                stage,
                model,
                units,
                plugin,
                mesh.over(*replicas, "dp_shard"),
                mesh.within(*replicas, "dp_shard"),
                keeps_outputs=precision.is_autocast,
                reshards=self.config.reshard_between_parts,
            )

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The model that the user gave; what lies on other ranks has no values."""
        inner = model.module if isinstance(model, Pipelined) else model
        return super().unwrap(inner, keep_fp32_wrapper, keep_torch_compile)

    def held(self, model: nn.Module, prepared: nn.Module) -> nn.Module:
        """The prepared model: it knows who has what."""
        return prepared

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all stages: optimizers keep those of other ranks, without values, gradients and state."""
        return parameters_by_name(model.module if isinstance(model, Pipelined) else model)

    # -- training ------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, scaler: Any, **kwargs: Any) -> None:
        """Raises: the backward of a pipeline is a part of its step."""
        raise PreparationError(
            "accelerator.backward(loss) under pipeline parallelism: forward and backward of several parts of the batch "
            "interleave, so both are in `loss = accelerator.pipeline_step(model, (inputs, targets), loss_function)`."
        )

    def pipeline_step(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        targets: Any,
        loss_function: LossFunction,
        *,
        scaler: Any,
        num_steps: int,
        synchronises: bool,
    ) -> torch.Tensor:
        """Gradients are added on every stage, and averaged over replicas if the update is complete; the loss."""
        if not isinstance(model, Pipelined):
            raise PreparationError(
                f"pipeline_step() got a {type(model).__name__} that isn't spread over stages. Give it what "
                "accelerator.prepare(model, ...) returned."
            )
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.world.device))  # by every stage
        loss = model.timetable.train(inputs, targets, loss_function, scale=scale / num_steps, training=model.training)
        if synchronises:
            self._synchronise(model)
        return loss

    def gradients(self, model: nn.Module) -> dict[str, Any] | None:
        """The gradients of this rank's stages, before they are added up over stages and averaged over replicas."""
        return sharded_gradients(_stages_of(model), lambda: self.named_parameters(model))

    def take_gradients(self, model: nn.Module, gradients: Mapping[str, Any] | None) -> None:
        """Give this rank's stages their gradients."""
        take_sharded_gradients(_stages_of(model), lambda: self.named_parameters(model), gradients)

    def _synchronise(self, model: Pipelined) -> None:
        """Gradients of parameters that several stages have are added up, and all are averaged over the replicas."""
        model.timetable.reduce()
        stages = self.mesh.group("pp")
        named = dict(model.module.named_parameters())
        for name, shape in model.shared.items():
            parameter = named[name]
            total = torch.zeros(shape, dtype=parameter.dtype, device=self.world.device)
            if parameter.is_meta:
                dist.all_reduce(total, group=stages)
                continue
            parameter.grad = _laid_as_parameter(parameter)
            total.copy_(own_piece(parameter.grad))
            dist.all_reduce(total, group=stages)
            own_piece(parameter.grad).copy_(total)
        replicas = self.mesh.group("dp_replicate")
        if replicas is None or self.shards:  # shards are averaged over the replicas when they are reduced
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(own_piece(parameter.grad))
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.mesh.size("dp_replicate"))
            dist.all_reduce(flat, group=replicas)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """The norm over all stages is at most ``max_norm``; a collective of the pipeline."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [own_piece(parameter.grad) for parameter in chosen if parameter.grad is not None]
        counted = [p.grad for p in chosen if p.grad is not None and p not in self._shared]
        # First within the stage, whose ranks hold the same pieces; then all stages alike.
        of_stage = total_norm(map(pieces, counted), float(norm_type), self.world.device)
        norm = total_norm([(of_stage, (self.mesh.group("pp"),))], float(norm_type), self.world.device)
        scale_to(gradients, norm, max_norm, error_if_nonfinite)
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """No gradient element is larger than ``clip_value`` in size."""
        clamp_pieces(parameters, clip_value)

    # -- state ---------------------------------------------------------------------------------------------

    def full_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on the main process, in CPU memory; an empty one elsewhere. A collective."""
        if not isinstance(model, Pipelined):
            return super().full_state_dict(model, unwrap)
        return self.access.whole_model(model, self.world.is_main)

    @property
    def access(self) -> StateAccess:
        """How checkpoints give and take the state of stages."""
        return OverStages(self.mesh, self.world.device, self.named_parameters)

    def saved(self, models: Sequence[Any], optimizers: Sequence[Any], *, model_only: bool = False) -> dict[str, Any]:
        """Weights and optimizers in shards, where FSDP's plugin says so; else as one process has them."""
        if self.shards:
            plugin = self.options.plugins["fsdp_plugin"]
            return saved_as(plugin, self.access, models, optimizers, self.world, model_only)
        inner = [] if model_only else list(map(inner_optimizer, optimizers))
        return gathered(self.access, models, inner, self.world.is_local_main)


def _tensors(stage: nn.Module) -> Iterator[torch.Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()


def _stages_of(model: nn.Module) -> list[nn.Module]:
    return list(model.timetable.stages.values()) if isinstance(model, Pipelined) else []


def _owners(model: nn.Module, stages: Sequence[nn.Module], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """By name, the ranks of the pipeline that have the parameter or buffer; the first, for one that no stage uses."""
    having: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for tensor in _tensors(stage):
            having.setdefault(id(tensor), set()).add(number % num_ranks)
    state = model.state_dict(keep_vars=True)
    return {name: tuple(sorted(having.get(id(tensor), {0}))) for name, tensor in state.items()}


def _lay_on(stage: nn.Module, device: torch.device) -> None:
    for tensor in _tensors(stage):  # in place: the user's own model has the same objects
        tensor.data = tensor.data.to(device)
    stage.to(device)


def _laid_as_parameter(parameter: Any) -> torch.Tensor:
    """The gradient of ``parameter``, in the same pieces; zeros where it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if placements_of(gradient) == placements_of(parameter):
        return gradient
    return gradient.redistribute(placements=parameter.placements)  # an embedding's, of tokens that ranks have in part


def _make_equal(stage: nn.Module, replicas: World) -> None:
    """Replicas of ``stage`` start as the first one does."""
    if replicas.size == 1:
        return
    source = 0 if replicas.group is None else dist.get_global_rank(replicas.group, 0)
    for tensor in {id(tensor): tensor for tensor in _tensors(stage)}.values():
        dist.broadcast(own_piece(tensor.detach()), source, replicas.group)


def _compute_in(precision: Precision, stage: nn.Module, is_last: bool) -> None:
    """``stage`` computes in ``precision``; what it hands to the next one keeps the dtype that it has."""
    if is_last or not precision.is_autocast:
        precision.patch_forward(stage)
        return
    forward = stage.forward

    def under_autocast(*args: Any) -> Any:
        with precision.autocast():
            return forward(*args)

    stage.forward = under_autocast
