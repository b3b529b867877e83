"""Layers dealt to the ranks of a pipeline: torch's schedules (GPipe, 1F1B, interleaved) from a raw loop.

Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019, and "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021. Replicas of the pipeline average their gradients once an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..checkpointing.sharded import StateAccess
from ..errors import NotBuilt, PreparationError, SettingError
from ..plugins.pipeline import PipelineParallelConfig
from ..precision import Precision
from ..settings.labels import DistributedType
from ..world import World
from .base import Strategy
from .compile import compile_model
from .norms import scale_to, total_norm
from .pipeline_state import OverStages
from .rebind import inner_optimizer, parameters_by_name
from .shard_saving import gathered
from .stages import choose_points, drop_foreign, split
from .timetable import LossFunction, Timetable

_NOT_COMBINED = ("dp_shard", "ep", "cp", "sp", "tp")


@final
class Pipelined(nn.Module):
    """A model of which this rank has some stages; the parameters of the others have a shape and no values.

    ``accelerator.pipeline_step`` trains it. Calling it computes, without gradients, the same output on every rank.
    """

    def __init__(self, module: nn.Module, timetable: Timetable, owners: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        # Not a child: names of parameters are the user's own, and foreign ones are no part of this rank.
        self.__dict__["module"] = module
        self.__dict__["timetable"] = timetable
        self.__dict__["owners"] = owners  # by parameter and buffer, the ranks of the pipeline that have it
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
        return getattr(self.__dict__["module"], name)


@final
class Pipeline(Strategy):
    """Each rank has some of the layers; batches go through them in parts."""

    communicates_in_forward = True

    def __init__(self, world: World, options: Any) -> None:
        super().__init__(world, options)
        combined = self.mesh.active(*_NOT_COMBINED)
        if combined or options.plugins.get("fsdp_plugin") is not None:
            what = f"{combined[0]}_size={self.mesh.size(combined[0])}" if combined else "an FSDP plugin"
            raise NotBuilt(
                f"ParallelismConfig(pp_size={self.mesh.size('pp')}) together with {what}: pipelines are combined with "
                f"dp_replicate_size only ({self.mesh.equation()}). Set the others to 1 and leave FSDP out, or set "
                "pp_size=1."
            )
        # Parameters that an earlier rank of the pipeline has too: their gradients count once in a norm.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @classmethod
    def suits(cls, settings: Any, world: World) -> bool:
        """True where layers are to be dealt to several ranks."""
        return settings.parallelism is not None and settings.parallelism.pp_size > 1 and world.size > 1

    @property
    def label(self) -> DistributedType:
        """MULTI_CPU, MULTI_GPU, ...: the vendor's word."""
        return DistributedType(self.world.kind.label)

    @property
    def config(self) -> PipelineParallelConfig:
        """How to split, and in which order to work."""
        plugin = self.options.plugins.get("parallelism_config")
        return getattr(plugin, "pp_handler", None) or PipelineParallelConfig()

    # -- placing -------------------------------------------------------------------------------------------

    def place_model(
        self, model: nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> nn.Module:
        """``model`` with this rank's stages on its device, in its precision, and nothing of the others."""
        if isinstance(model, Pipelined):
            return model
        if precision.scaler is not None:
            raise SettingError(
                f"mixed_precision={precision.label!r} with pp_size={self.mesh.size('pp')}: stages would have to agree "
                "on every overflow. Use mixed_precision='bf16'."
            )
        model = precision.convert(model)
        trained, evaluated = self._stages(model)
        ranks = self.mesh.size("pp")
        owners = _owners(model, trained, ranks)
        mine = [number for number in range(len(trained)) if number % ranks == self.mesh.place("pp")]
        kept = {id(tensor) for number in mine for tensor in _tensors(trained[number])}
        drop_foreign(model, kept)
        for name, parameter in model.named_parameters():
            if id(parameter) in kept and owners[name][0] != self.mesh.place("pp"):
                self._shared[parameter] = True
        for stages in (trained, evaluated):
            for number in mine:
                _lay_on(stages[number], self.world.device)
                _compute_in(precision, stages[number], is_last=number == len(stages) - 1)
        plugin = self.options.dynamo_plugin
        if plugin is not None:
            trained = [compile_model(one, plugin) if number in mine else one for number, one in enumerate(trained)]
        own = ({number: stages[number] for number in mine} for stages in (trained, evaluated))
        timetable = Timetable(self.world, self.mesh, self.config, len(trained), *own)
        return Pipelined(model, timetable, owners)

    def _stages(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The stages for training and for evaluation: the same, unless a trace has made one mode of them final."""
        config = self.config
        num_stages = self.mesh.size("pp") * (config.stages_per_rank or 1)
        points = config.split_points or choose_points(model, num_stages)
        if len(points) != num_stages - 1:
            raise SettingError(
                f"PipelineParallelConfig(split_points={list(points)}) makes {len(points) + 1} stages, but pp_size="
                f"{self.mesh.size('pp')} with {config.stages_per_rank} stage(s) per rank takes {num_stages}. Name "
                f"{num_stages - 1} modules."
            )
        if isinstance(model, nn.Sequential) and all("." not in point for point in points):
            stages = split(model, points, None)
            return stages, stages
        was_training = model.training
        trained = split(model.train(), points, config.example_inputs)
        evaluated = split(model.eval(), points, config.example_inputs)
        model.train(was_training)
        return trained, evaluated

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
        loss = model.timetable.train(inputs, targets, loss_function, num_steps=num_steps, training=model.training)
        if synchronises:
            self._synchronise(model)
        return loss

    def _synchronise(self, model: Pipelined) -> None:
        """Gradients of parameters that several stages have are added up, and all are averaged over the replicas."""
        stages = self.mesh.group("pp")
        for name, parameter in model.module.named_parameters():
            if len(model.owners[name]) > 1 and parameter.requires_grad:
                here = parameter if not parameter.is_meta else None
                gradient = None if here is None else here.grad
                total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.world.device)
                total = total if gradient is None else total.copy_(gradient)
                dist.all_reduce(total, group=stages)
                if here is not None:
                    here.grad = total
        replicas = self.mesh.group("dp_replicate")
        if replicas is None:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.mesh.size("dp_replicate"))
            dist.all_reduce(flat, group=replicas)
            pieces = flat.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """The norm over all stages is at most ``max_norm``; a collective of the pipeline."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        counted = [p.grad for p in chosen if p.grad is not None and p not in self._shared]
        axes = (self.mesh.group("pp"),)
        norm = total_norm(((grad, axes) for grad in counted), float(norm_type), self.world.device, known=[axes])
        scale_to(gradients, norm, max_norm, error_if_nonfinite)
        return norm

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
        """Weights and optimizers as one process has them: any strategy and any number of ranks can load them."""
        inner = [] if model_only else list(map(inner_optimizer, optimizers))
        return gathered(self.access, models, inner, self.world.is_local_main)


def _tensors(stage: nn.Module) -> Iterator[torch.Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()


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
