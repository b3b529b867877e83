"""Pipeline schedules: torch's schedules over the stages of a model, cached by the shape of the batch.

The parameters of stages may be sharded over the replicas of the stage (torch's ``fully_shard``). A batch passes a stage
in micro-batches. Parameters are gathered for the first one and kept until the last one's backward. Gradients are
accumulated unsharded and reduce-scattered once per update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...distributed.mesh import Mesh
from ...distributed.world import World
from ...errors import PreparationError, SettingError
from ...modules import parameter_places, put_parameter
from ...nested import split_batch
from ...plugins.fsdp import FullyShardedDataParallelPlugin
from ...plugins.parallelism import PipelineParallelConfig
from ...torch_private.fsdp import mixed_precision_policy, reduce_sharded_gradients, reshard, suspend_fsdp_hooks
from ...torch_private.tracing import (
    TreeSpec,
    data_dependent_errors,
    fake_tensor_mode,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from ..fsdp.setup import replicate_unsharded

LossFunction = Callable[[Any, Any], torch.Tensor]


@final
@dataclass(frozen=True)
class TensorMeta:
    """The size, stride, dtype and ``requires_grad`` of a tensor, exchanged between ranks."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Return the metadata of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialised tensor with this metadata."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


TensorMetas = tuple[TensorMeta, ...]


@final
@dataclass(frozen=True)
class ScheduleKey:
    """The key of a schedule in the cache: the batch's metadata and the kind of pass."""

    inputs: TensorMetas  # of one micro-batch
    num_parts: int
    _: KW_ONLY
    training: bool
    has_backward: bool


def broadcast_object(value: Any, rank: int, group: Any = None) -> Any:
    """Return the ``value`` of rank ``rank`` on every rank; a collective."""
    values = [value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch unpickles a TreeSpec by its own old name
        dist.broadcast_object_list(values, rank, group)
    return values[0]


@final
@dataclass(frozen=True)
class _StageTensors:
    """The inputs and outputs of every stage, for one micro-batch."""

    shapes: tuple[TensorMetas, ...]  # the inputs of each stage, and the outputs of the last one
    structure: TreeSpec  # of the last stage's output


@final
class PipelineSchedule:
    """The stages of one model on this rank, and torch's schedules that run them.

    Args:
        stages: this rank's stages, by number.
    """

    def __init__(
        self, world: World, mesh: Mesh, config: PipelineParallelConfig, num_stages: int, stages: Mapping[int, nn.Module]
    ) -> None:
        self._world, self._config = world, config
        self.num_stages: int = num_stages
        self.stages = stages
        self._group, self._ranks = mesh.group("pp"), mesh.ranks("pp")
        self._known: dict[ScheduleKey, tuple[Any, _StageTensors]] = {}
        #: (output of the last stage, number of the micro-batch) -> loss; during a step.
        self._loss_of: Callable[[Any, torch.Tensor], torch.Tensor] | None = None

    # -- running -------------------------------------------------------------------------------------------

    def train(
        self, inputs: tuple[Any, ...], targets: Any, loss_function: LossFunction, *, scale: Any, training: bool
    ) -> torch.Tensor:
        """Accumulate gradients, times ``scale``, on every stage; return the loss of the batch on every rank."""
        schedule, flow, num_parts = self._schedule(inputs, training=training, has_backward=True)
        parts = [part for part, _ in split_batch(targets, len(inputs[0]), num_parts)]
        losses: list[torch.Tensor] = []
        factor = scale / num_parts

        def loss_of(leaves: Any, number: torch.Tensor) -> torch.Tensor:
            loss = loss_function(tree_unflatten(leaves, flow.structure), parts[int(number)])
            losses.append(loss.detach())
            return loss * factor

        # torch splits a range of micro-batch numbers instead of the targets, because those may have any structure.
        numbers = torch.arange(num_parts)
        given = inputs if 0 in self.stages else ()
        self._loss_of = loss_of
        try:
            schedule.step(*given, target=numbers, return_outputs=False)
        finally:
            self._loss_of = None
            reshard(self.stages.values())
        # All ranks know the dtype of the outputs, but only the last one knows that of the loss.
        precise = any(meta.dtype is torch.float64 for meta in flow.shapes[-1])
        loss = torch.zeros((), dtype=torch.float64 if precise else torch.float32, device=self._world.device)
        if losses:
            loss = torch.stack([part.to(loss.dtype) for part in losses]).mean()
        dist.broadcast(loss, self._rank_of(self.num_stages - 1), self._group)
        return loss

    def evaluate(self, inputs: tuple[Any, ...], *, training: bool) -> Any:
        """Return the output of the last stage for the whole batch, on every rank."""
        schedule, flow, num_parts = self._schedule(inputs, training=training, has_backward=False)
        try:
            output = schedule.eval(*(inputs if 0 in self.stages else ()))
        finally:
            reshard(self.stages.values())
        leaves: list[Any] = [None] * len(flow.shapes[-1]) if output is None else list(output)
        for place, shape in enumerate(flow.shapes[-1]):
            whole = (shape.size[0] * num_parts, *shape.size[1:])
            if leaves[place] is None:
                leaves[place] = torch.empty(whole, dtype=shape.dtype, device=self._world.device)
            dist.broadcast(leaves[place], self._rank_of(self.num_stages - 1), self._group)
        return tree_unflatten(leaves, flow.structure)

    def reduce(self) -> None:
        """Average gradients of sharded stages over the ranks of their shards."""
        for stage in self.stages.values():
            _reduce_gradients(stage)

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    # -- schedules -----------------------------------------------------------------------------------------

    def _num_parts(self, size: int) -> int:
        """Return the largest number of equal micro-batches, up to the configured one."""
        wanted = self._config.num_micro_batches or self.num_stages
        return max(number for number in range(1, min(wanted, size) + 1) if size % number == 0)

    def _schedule(
        self, inputs: Sequence[torch.Tensor], *, training: bool, has_backward: bool
    ) -> tuple[Any, _StageTensors, int]:
        """Return torch's schedule for a batch, the tensors of its stages, and the number of micro-batches."""
        size = _size_of(inputs)
        num_parts = self._num_parts(size)
        metas = tuple(TensorMeta.of(tensor[: size // num_parts]) for tensor in inputs)
        key = ScheduleKey(metas, num_parts, training=training, has_backward=has_backward)
        if key not in self._known:
            flow = self._infer_stage_tensors(metas, has_backward=has_backward)
            self._known[key] = self._make(flow, num_parts, has_backward=has_backward), flow
        return *self._known[key], num_parts

    def _make(self, flow: _StageTensors, num_parts: int, *, has_backward: bool) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

        def examples(shapes: TensorMetas) -> tuple[torch.Tensor, ...]:
            return tuple(shape.empty("meta") for shape in shapes)

        stages = [
            _stage_class()(
                module,
                number,
                self.num_stages,
                self._world.device,
                input_args=examples(flow.shapes[number]),
                output_args=examples(flow.shapes[number + 1]),
                group=self._group,
            )
            for number, module in self.stages.items()
        ]
        num_ranks = len(self._ranks)

        def loss_of(output: Any, number: torch.Tensor) -> torch.Tensor:  # the schedule is kept for other losses
            assert self._loss_of is not None, "the schedule runs inside train()"
            return self._loss_of(output, number)

        # Divide the losses: dividing gradients would also divide those of earlier micro-batches.
        options: dict[str, Any] = {"loss_fn": loss_of if has_backward else None, "scale_grads": False}
        if len(stages) > 1:
            divides = num_parts % max(1, num_parts // num_ranks) == 0
            kind: Any = ScheduleInterleaved1F1B if has_backward and divides else ScheduleLoopedBFS
            return kind(stages, num_parts, **options)
        in_turns = has_backward and self._config.schedule == "1f1b" and num_parts >= self.num_stages
        single: Any = Schedule1F1B if in_turns else ScheduleGPipe
        return single(stages[0], num_parts, **options)

    # -- shapes --------------------------------------------------------------------------------------------

    def _infer_stage_tensors(self, inputs: TensorMetas, *, has_backward: bool) -> _StageTensors:
        """Infer the tensors between stages without computing them; a collective of the pipeline.

        Raises:
            PreparationError: on every rank, if a stage can't compute with the output of the previous one.
        """
        found: list[TensorMetas] = [inputs]
        structure: Any = None
        for number in range(self.num_stages):
            mine = self.stages.get(number)
            answer = None if mine is None else self._infer_output(mine, found[-1], has_backward)
            answer = broadcast_object(answer, self._rank_of(number), self._group)
            if isinstance(answer, str):
                raise PreparationError(
                    f"Stage {number} of the pipeline can't compute with inputs of shapes "
                    f"{[list(shape.size) for shape in found[-1]]}: {answer}"
                )
            shapes, structure = answer
            found.append(shapes)
        return _StageTensors(tuple(found), structure)

    def _infer_output(
        self, stage: nn.Module, inputs: TensorMetas, has_backward: bool
    ) -> tuple[TensorMetas, TreeSpec] | str:
        try:
            with torch.set_grad_enabled(has_backward):
                output = self._output_of(stage, inputs, may_compute=not has_backward)
        except Exception as error:  # broadcast to all ranks, which raise it together
            return f"{type(error).__name__}: {error}"
        leaves, structure = tree_flatten(output)
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if strange:
            return f"its output has a {strange[0]}; stages hand on tensors, and structures of them"
        return tuple(TensorMeta.of(leaf.contiguous()) for leaf in leaves), structure

    def _output_of(self, stage: nn.Module, inputs: TensorMetas, *, may_compute: bool) -> Any:
        """Return a fake output; with ``may_compute``, compute it from zeros if the forward depends on values."""
        try:
            with fake_tensor_mode():
                return _infer_outputs(stage, [shape.empty(self._world.device) for shape in inputs])
        except data_dependent_errors():
            if not may_compute:
                raise
            return stage(*(torch.zeros_like(shape.empty(self._world.device)) for shape in inputs))


@cache  # made when first needed: importing torch's part takes a while
def _stage_class() -> type:
    from torch.distributed.pipelining import PipelineStage

    @final
    class UnreducedStage(PipelineStage):
        """A stage that returns a flat tuple of contiguous tensors, ready to be sent.

        :meth:`PipelineSchedule.reduce` reduces its gradients.
        """

        def forward_maybe_with_nosync(self, *args: object, **kwargs: Any) -> tuple[Any, ...]:
            leaves = tree_flatten(super().forward_maybe_with_nosync(*args, **kwargs))[0]
            return tuple(leaf.contiguous() for leaf in leaves)

        def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=False)

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            assert grad_scale_factor == 1, "losses are divided where they are made"

        # From torch 2.15 on, interleaved schedules call these two for a sharded stage.
        def start_gradient_reduction(self) -> None:
            pass

        def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
            self.perform_reduce_grad(grad_scale_factor)

    return UnreducedStage


def _size_of(inputs: Sequence[Any]) -> int:
    if not inputs or not all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in inputs):
        raise SettingError(
            f"The inputs of a pipeline are tensors with a dimension of samples in front, got "
            f"({', '.join(type(one).__name__ for one in inputs)}). Give them as `pipeline_step(model, (inputs, "
            "targets), loss_function)`, where `inputs` is a tensor or a tuple of tensors."
        )
    return len(inputs[0])


# --------------------------------------------------------------------------------------------------
# Sharded stages


def shard_stage(
    stage: nn.Module,
    model: nn.Module,
    units: Sequence[nn.Module],
    plugin: FullyShardedDataParallelPlugin,
    mesh: DeviceMesh,
    world: World,
    *,
    keeps_outputs: bool,
    reshards: bool,
) -> None:
    """Shard ``stage`` and its ``units`` over ``mesh``, and put the shards into ``model`` under the model's own names.

    Args:
        world: the ranks that have this stage.
        keeps_outputs: the stage's own forward decides the dtype of its outputs.
        reshards: parameters are freed after each micro-batch, as the plugin says, and gathered again for the next one.
    """
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload, "reshard_after_forward": False}
    if reshards:
        options["reshard_after_forward"] = plugin.reshard_after_forward
    if plugin.mixed_precision_policy is not None:
        options["mp_policy"] = plugin.mixed_precision_policy
    in_stage, in_model = parameter_places(stage), parameter_places(model)
    in_both = [(places[0], in_model[parameter]) for parameter, places in in_stage.items() if parameter in in_model]
    own = set(stage.modules())
    for unit in units:
        if unit in own:
            fully_shard(unit, **options)
    if keeps_outputs and "mp_policy" in options:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    fully_shard(stage, **options)
    for (holder, name), places in in_both:
        put_parameter(places, holder.get_parameter(name))
    replicate_unsharded(stage, mesh, world)


def _reduce_gradients(stage: nn.Module) -> None:
    """Reduce-scatter the gradients accumulated since the last call; they are averaged over the ranks of the shards."""
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    reduce_sharded_gradients(stage)


def _infer_outputs(stage: nn.Module, inputs: Sequence[torch.Tensor]) -> object:
    """Return the outputs of ``stage`` inside a FakeTensorMode, without gathering parameters."""
    if not isinstance(stage, FSDPModule):
        return stage(*inputs)
    dtype = mixed_precision_policy(stage).param_dtype
    parameters, places = list(stage.parameters()), parameter_places(stage)
    try:
        for parameter in parameters:
            put_parameter(places[id(parameter)], _gathered_shape(parameter, dtype or parameter.dtype, inputs[0].device))
        with _only_casting(stage):
            return stage(*inputs)
    finally:
        for parameter in parameters:
            put_parameter(places[id(parameter)], parameter)


def _gathered_shape(parameter: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor in the shape that the forward sees; a DTensor if the layer is tensor-parallel too."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes = list(parameter.shape)
    if "tp" not in (mesh.mesh_dim_names or ()):
        return torch.empty(sizes, dtype=dtype, device=device, requires_grad=parameter.requires_grad)
    placement = placements[-1]
    if isinstance(placement, Shard):
        sizes[placement.dim] //= mesh["tp"].size()
    shard = torch.empty(sizes, dtype=dtype, device=device)
    made = DTensor.from_local(shard, mesh["tp"], [placement], run_check=False)
    return made.requires_grad_(parameter.requires_grad)


@contextmanager
def _only_casting(stage: nn.Module) -> Iterator[None]:
    """Enter a context in which sharded modules in ``stage`` cast inputs and outputs without gathering."""
    restore: list[Callable[[], None]] = []
    handles: list[Any] = []
    for module in [module for module in stage.modules() if isinstance(module, FSDPModule)]:
        restore.append(suspend_fsdp_hooks(module))
        policy = mixed_precision_policy(module)
        handles.append(module.register_forward_pre_hook(_casting_inputs(policy), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(_casting_output(policy)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for function in restore:
            function()


def _casting_inputs(policy: MixedPrecisionPolicy) -> Callable[..., tuple[object, object]]:
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return lambda module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype))


def _casting_output(policy: MixedPrecisionPolicy) -> Callable[..., object]:
    return lambda module, args, output: _cast(output, policy.output_dtype)


def _cast(values: object, dtype: torch.dtype | None) -> object:
    def cast(value: object) -> object:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return values if dtype is None else tree_map(cast, values)
