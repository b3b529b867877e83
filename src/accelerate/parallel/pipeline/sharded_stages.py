"""Pipeline stages whose parameters are sharded over the replicas of the stage (torch's ``fully_shard``).

A batch passes a stage in micro-batches. Parameters are gathered for the first one and kept until the last one's
backward. Gradients are accumulated unsharded and reduce-scattered once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...distributed.world import World
from ...modules import parameter_places, put_parameter
from ...plugins.fsdp import FullyShardedDataParallelPlugin
from ...torch_private.fsdp import mixed_precision_policy, reduce_sharded_gradients, suspend_fsdp_hooks
from ...torch_private.tracing import tree_map
from ..fsdp.setup import replicate_unsharded


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


def reduce_gradients(stage: nn.Module) -> None:
    """Reduce-scatter the gradients accumulated since the last call; they are averaged over the ranks of the shards."""
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    reduce_sharded_gradients(stage)


def free_gathered(stage: nn.Module) -> None:
    """Reshard all parameters of ``stage``."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def infer_outputs(stage: nn.Module, inputs: Sequence[torch.Tensor]) -> object:
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
