"""Stages of a pipeline whose parameters lie in shards over the replicas of the stage (torch's ``fully_shard``).

A batch goes through a stage in parts. Parameters are gathered for the first part and kept until the last one's
backward; gradients are added up whole and reduced once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..torch_private.fsdp import precision_of, reduce_shards, without_own_hooks
from ..torch_private.tracing import tree_map
from ..world import World
from .shard_setup import replicate_rest


def shard_stage(
    stage: nn.Module,
    model: nn.Module,
    units: Sequence[nn.Module],
    plugin: Any,
    mesh: DeviceMesh,
    world: World,
    *,
    keeps_outputs: bool,
    reshards: bool,
) -> None:
    """``stage`` and, inside it, ``units`` are sharded over ``mesh``, and ``model`` has the pieces under its own names.

    Args:
        world: the ranks that have this stage.
        keeps_outputs: the stage's own forward decides the dtype of its outputs.
        reshards: parameters are freed after each part of a batch, as the plugin says, and gathered for the next one.
    """
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": plugin.cpu_offload, "reshard_after_forward": False}
    if reshards:
        options["reshard_after_forward"] = plugin.reshard_after_forward
    if plugin.mixed_precision_policy is not None:
        options["mp_policy"] = plugin.mixed_precision_policy
    held = {id(parameter): (module, name) for module, name, parameter in _places(stage)}
    places = [(module, name, held[id(p)]) for module, name, p in _places(model) if id(p) in held]
    own = set(stage.modules())
    for unit in units:
        if unit in own:
            fully_shard(unit, **options)
    if keeps_outputs and "mp_policy" in options:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    fully_shard(stage, **options)
    for module, name, (holder, held_name) in places:
        module._parameters[name] = holder._parameters[held_name]
    replicate_rest(stage, mesh, world)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def reduce_gradients(stage: nn.Module) -> None:
    """The gradients of all parts since the last time are averaged over the shards' ranks, and lie in pieces."""
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    reduce_shards(stage)


def free_gathered(stage: nn.Module) -> None:
    """Of parameters only this rank's pieces are left."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def outputs_of(stage: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """What ``stage`` hands on, inside a FakeTensorMode: nothing is gathered."""
    if not isinstance(stage, FSDPModule):
        return stage(*inputs)
    dtype = precision_of(stage).param_dtype
    places = list(_places(stage))
    made = {id(p): _gathered_shape(p, dtype or p.dtype, inputs[0].device) for _, _, p in places}
    try:
        for module, name, parameter in places:
            module._parameters[name] = made[id(parameter)]  # pyright: ignore[reportArgumentType]
        with _only_casting(stage):
            return stage(*inputs)
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _gathered_shape(parameter: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a forward sees in the place of ``parameter``; a piece, where it is cut over tensor-parallel ranks too."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes = list(parameter.shape)
    if "tp" not in (mesh.mesh_dim_names or ()):
        return torch.empty(sizes, dtype=dtype, device=device, requires_grad=parameter.requires_grad)
    placement = placements[-1]
    if isinstance(placement, Shard):
        sizes[placement.dim] //= mesh["tp"].size()
    piece = torch.empty(sizes, dtype=dtype, device=device)
    made = DTensor.from_local(piece, mesh["tp"], [placement], run_check=False)
    return made.requires_grad_(parameter.requires_grad)


@contextmanager
def _only_casting(stage: nn.Module) -> Iterator[None]:
    """Sharded modules in ``stage`` cast what goes in and out, and don't gather."""
    put_back: list[Callable[[], None]] = []
    handles: list[Any] = []
    for module in [module for module in stage.modules() if isinstance(module, FSDPModule)]:
        put_back.append(without_own_hooks(module))
        policy = precision_of(module)
        handles.append(module.register_forward_pre_hook(_casting_inputs(policy), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(_casting_output(policy)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for function in put_back:
            function()


def _casting_inputs(policy: Any) -> Any:
    dtype = policy.param_dtype if policy.cast_forward_inputs else None
    return lambda module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype))


def _casting_output(policy: Any) -> Any:
    return lambda module, args, output: _cast(output, policy.output_dtype)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return values if dtype is None else tree_map(cast, values)
