"""Private names of FSDP 1 and 2: flat parameters, unsharded gradients, and runtime state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch

from .names import uses

if TYPE_CHECKING:  # half a second to import, and it brings sympy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

#: Restores gradients.
Restore = Callable[[], None]
#: Copies the gradients of parameters, and returns a function that restores them.
Snapshot = Callable[[Iterable[torch.Tensor]], Restore]

_FLAT = "torch.distributed.fsdp._flat_param"
_WRAPPER = "torch.distributed.fsdp._common_utils"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_COMMON = "torch.distributed.fsdp._fully_shard._fsdp_common"
_SAVED = "_saved_grad_shard"  # sharded gradients from before passes without reduction; may be missing
_HOOK = "_post_backward_hook_state"
_ACCUMULATED = "unsharded_accumulated_grad"
_QUEUED = "_post_backward_callback_queued"
_uses_unsharded_gradients = uses(
    f"{_PARAMETER}:._unsharded_param",
    f"{_PARAMETER}:.sharded_param",
    # From torch 2.15 on it is the gradient of the unsharded parameter itself, and can't be set.
    (f"{_PARAMETER}:.{_ACCUMULATED}", None, f"{_PARAMETER}:._unsharded_param"),
)


class FlatGradients(TypedDict, total=False):
    """The gradients of one unit between two updates."""

    names: list[str]
    gradient: torch.Tensor | None
    before: torch.Tensor | None  # the shard reduced before passes without reduction
    is_none: list[bool] | None


class FlatPart(NamedTuple):
    """A parameter inside a flat one: its dotted name in the unit, its shape, and its own elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int


@uses("torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2")
def hybrid_without_resharding() -> ShardingStrategy:
    """Return the strategy that shards within a node, replicates between nodes, and doesn't reshard after forward."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy._HYBRID_SHARD_ZERO2


@uses("torch.distributed.fsdp.wrap:_Policy._run_policy")
def modules_of_policy(
    policy: object, model: torch.nn.Module, ignored: set[torch.nn.Module]
) -> Iterable[torch.nn.Module] | None:
    """Return the modules that torch's policy object wraps; None if ``policy`` is no such object."""
    run: Callable[..., Any] | None = getattr(policy, "_run_policy", None)
    return run(model, ignored, {}) if callable(run) else None


# -- FSDP 1: flat parameters ---------------------------------------------------------------------------------------


@uses(f"{_WRAPPER}:._handle")
def handle_of(module: FullyShardedDataParallel) -> FlatParamHandle | None:
    """Return the handle of the unit's flat parameter; None for a unit without parameters of its own."""
    return module._handle


@uses(f"{_FLAT}:FlatParamHandle", f"{_FLAT}:._use_orig_params", f"{_FLAT}:._params")
def trained_parameters(handle: FlatParamHandle) -> list[torch.Tensor]:
    """Return the unit's parameters in an optimizer: the user's own, or the flat one."""
    return list(handle.flat_param._params or ()) if handle._use_orig_params else [handle.flat_param]


@uses(f"{_FLAT}:._use_orig_params", f"{_FLAT}:._shared_param_infos", f"{_FLAT}:._fqns")
def flat_parameter_names(handle: FlatParamHandle) -> list[str]:
    """Return the dotted names, with ties, inside a trained flat parameter; empty with original parameters."""
    if handle._use_orig_params:
        return []
    shared = [f"{info.module_name}.{info.param_name}".lstrip(".") for info in handle.flat_param._shared_param_infos]
    return [*handle.flat_param._fqns, *shared]


@uses(
    f"{_FLAT}:._fqns",
    f"{_FLAT}:._shapes",
    f"{_FLAT}:._strides",
    f"{_FLAT}:._numels_with_padding",
    f"{_FLAT}:._is_padding_mask",
)
def parts_of_flat(handle: FlatParamHandle) -> Iterator[FlatPart]:
    """Yield the parameters inside the unit's flat one, in order."""
    flat, begin, number = handle.flat_param, 0, 0
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            yield FlatPart(flat._fqns[number], tuple(flat._shapes[number]), flat._strides[number], begin, begin + size)
            number += 1
        begin += size


@uses(f"{_FLAT}:._param_infos", f"{_FLAT}:._shared_param_infos")
def places_in_flat(model: torch.nn.Module) -> dict[torch.nn.Module, dict[str, tuple[torch.nn.Module, str]]]:
    """Return, by module and name, the parameters inside flat ones; of tied ones, module and name of the first."""
    found: dict[torch.nn.Module, dict[str, tuple[torch.nn.Module, str]]] = {}
    for flat in (handle.flat_param for _, handle in _handles(model)):
        for info in flat._param_infos:
            found.setdefault(info.module, {})[info.param_name] = info.module, info.param_name
        for info in flat._shared_param_infos:
            found.setdefault(info.module, {})[info.param_name] = info.prim_module, info.prim_param_name
    return found


@uses(f"{_FLAT}:._local_shard", f"{_FLAT}:.process_group")
def flat_shard(handle: FlatParamHandle) -> tuple[torch.Tensor, int]:
    """Return this rank's shard of the unit's flat parameter in full precision, and its offset."""
    from torch.distributed import get_rank

    if not handle.uses_sharded_strategy:
        return handle.flat_param.detach(), 0
    shard: torch.Tensor | None = getattr(handle.flat_param, "_local_shard", None)  # from the first forward on
    shard = handle.flat_param.detach() if shard is None else shard
    return shard, get_rank(handle.process_group) * shard.numel()


@uses(f"{_RUNTIME}:._buffer_name_to_orig_dtype")
def buffer_dtypes(root: torch.nn.Module) -> dict[str, torch.dtype]:
    """Return by name the dtypes of buffers before mixed precision changed them."""
    return dict(getattr(root, "_buffer_name_to_orig_dtype", None) or {})


@uses(f"{_FLAT}:._params", f"{_FLAT}:._shared_params")
def all_flat_parameters(root: torch.nn.Module) -> dict[torch.Tensor, None]:
    """Return the flat parameters, and the user's own parameters that are views of them."""
    flats = [handle.flat_param for _, handle in _handles(root)]
    return dict.fromkeys(p for flat in flats for p in (flat, *(flat._params or ()), *(flat._shared_params or ())))


@uses(f"{_FLAT}:._is_grad_none_mask", f"{_FLAT}:.{_SAVED}")
def snapshot_flat_gradients(root: FullyShardedDataParallel, snapshot: Snapshot) -> Restore:
    """Copy the gradients of flat parameters, including unsharded ones; return a function that restores them."""
    flats, own = [handle.flat_param for _, handle in _handles(root)], all_flat_parameters(root)
    restore_others = snapshot(parameter for parameter in root.parameters() if parameter not in own)
    # The gradients of the user's own parameters are views of the flat ones, which are copied.
    views = [(parameter, None if parameter.grad is None else parameter.grad.data) for parameter in own]
    saved = [(flat, getattr(flat, _SAVED, None)) for flat in flats]
    masks = [(flat, flat._is_grad_none_mask and list(flat._is_grad_none_mask)) for flat in flats]
    values = [(t, t.clone()) for t in (*(flat.grad for flat in flats), *(t for _, t in saved)) if t is not None]
    values = [(tensor.data, copy) for tensor, copy in values]

    def restore() -> None:
        restore_others()
        for tensor, copy in values:
            tensor.copy_(copy)
        for parameter, gradient in views:
            _set_gradient(parameter, gradient)
        for flat, gradient in saved:
            flat.__dict__.pop(_SAVED, None)
            if gradient is not None:
                setattr(flat, _SAVED, gradient)
        for flat, mask in masks:
            flat._is_grad_none_mask = mask

    return restore


@uses(
    f"{_FLAT}:FlatParamHandle",
    f"{_FLAT}:._use_orig_params",
    f"{_FLAT}:._fqns",
    f"{_FLAT}:._is_grad_none_mask",
    f"{_FLAT}:.{_SAVED}",
)
def flat_gradients(root: FullyShardedDataParallel) -> list[FlatGradients]:
    """Return each unit's gradients between updates: sharded, or unsharded after passes without reduction.

    ``before`` is the shard reduced before those passes.
    """
    return [
        {
            "names": list(handle.flat_param._fqns),
            "gradient": _data(handle.flat_param.grad),
            "before": _data(getattr(handle.flat_param, _SAVED, None)),
            "is_none": handle.flat_param._is_grad_none_mask,
        }
        for _, handle in _handles(root)
    ]


@uses(
    (f"{_FLAT}:FlatParamHandle._use_unsharded_grad_views", "self"),
    (f"{_FLAT}:FlatParamHandle._use_sharded_grad_views", "self"),
    f"{_FLAT}:._use_orig_params",
    f"{_FLAT}:._unpadded_unsharded_size",
    f"{_FLAT}:._fqns",
    f"{_FLAT}:._is_grad_none_mask",
    f"{_FLAT}:.{_SAVED}",
)
def set_flat_gradients(root: FullyShardedDataParallel, units: Sequence[FlatGradients] | None) -> bool:
    """Set each unit's gradients to those of :func:`flat_gradients`, or clear them; return whether they fit."""
    handles = [handle for _, handle in _handles(root)]
    if units is None:
        units = [{"names": list(handle.flat_param._fqns)} for handle in handles]
    if [unit.get("names") for unit in units] != [list(handle.flat_param._fqns) for handle in handles]:
        return False
    pairs = list(zip(handles, units, strict=True))
    if not all(_fits(handle, unit.get("gradient")) for handle, unit in pairs):
        return False
    for handle, unit in pairs:
        flat, gradient, before = handle.flat_param, unit.get("gradient"), unit.get("before")
        is_unsharded = gradient is not None and gradient.shape == flat._unpadded_unsharded_size
        _set_gradient(flat, None if gradient is None else gradient.to(handle.device if is_unsharded else flat.device))
        flat.__dict__.pop(_SAVED, None)
        if before is not None:
            setattr(flat, _SAVED, before.to(handle.device))
        if not handle._use_orig_params:
            continue
        is_none = unit.get("is_none")
        if is_none is not None:
            flat._is_grad_none_mask = list(is_none)
        for parameter in (*(flat._params or ()), *(flat._shared_params or ())):
            parameter.grad = None
        if is_unsharded or not handle.uses_sharded_strategy:
            handle._use_unsharded_grad_views()
        elif gradient is not None:
            handle._use_sharded_grad_views()
    return True


def _fits(handle: FlatParamHandle, gradient: torch.Tensor | None) -> bool:
    flat = handle.flat_param
    return gradient is None or gradient.shape in (flat._unpadded_unsharded_size, flat.shape)


def _data(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.data


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set ``parameter.grad``; as in torch, ``gradient`` may be unsharded while the parameter is a shard."""
    if gradient is not None and (gradient.shape, gradient.dtype) != (parameter.shape, parameter.dtype):
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.data = gradient
    else:
        parameter.grad = gradient


@uses(
    f"{_WRAPPER}:TrainingState.IDLE",
    f"{_WRAPPER}:HandleTrainingState.IDLE",
    f"{_RUNTIME}:._is_root",
    f"{_RUNTIME}:._device_handle",
    f"{_RUNTIME}:._unshard_stream",
    f"{_RUNTIME}:._post_backward_stream",
    f"{_RUNTIME}:._all_reduce_stream",
    f"{_RUNTIME}:._all_fsdp_states",
    f"{_RUNTIME}:._exec_order_data",
    f"{_RUNTIME}:._unshard_event",
    f"{_RUNTIME}:.{_HOOK}",
    f"{_RUNTIME}:.{_QUEUED}",
    f"{_RUNTIME}:._ran_pre_backward_hook",
    f"{_RUNTIME}:._needs_pre_backward_unshard",
    f"{_RUNTIME}:._prefetched",
    f"{_RUNTIME}:._training_state",
    f"{_RUNTIME}:._post_backward_called",
    f"{_FLAT}:._post_forward_index",
)
def reset_flat_runtime(root: FullyShardedDataParallel) -> None:
    """Reset FSDP's runtime state: every unit is resharded and expects a forward."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

    if root._is_root is None:  # set lazily by the first forward
        return
    stream = root._device_handle.current_stream()
    for other in (root._unshard_stream, root._post_backward_stream, root._all_reduce_stream):
        stream.wait_stream(other)
    for state, handle in _handles(root):
        hook = handle.flat_param.__dict__.pop(_HOOK, None)
        if hook is not None:
            hook[-1].remove()
        handle._training_state = HandleTrainingState.IDLE
        handle.reshard(handle.uses_sharded_strategy)  # freed on every rank, so that all of them gather it again
        handle.post_reshard()
        handle.flat_param._post_backward_called = False
        setattr(handle, "_ran_pre_backward_hook", False)  # noqa: B010  (torch doesn't declare it)
        handle._needs_pre_backward_unshard = handle._prefetched = False
        handle._post_forward_index = None
        state._unshard_event = None
    for state in root._all_fsdp_states:
        state.training_state = TrainingState.IDLE
    setattr(root, _QUEUED, False)
    root._exec_order_data.handles_post_forward_order.clear()


def _handles(root: torch.nn.Module) -> Iterator[tuple[FullyShardedDataParallel, FlatParamHandle]]:
    """Yield the states of units with parameters, each with the handle of its flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for state in FullyShardedDataParallel.fsdp_modules(root):
        handle = handle_of(state)
        if handle is not None:
            yield state, handle


# -- FSDP 2: fully_shard -------------------------------------------------------------------------------------------


@uses(("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "self"), f"{_STATE}:FSDPState")
def _state_of(module: FSDPModule) -> FSDPState:
    return module._get_fsdp_state()


# Before torch 2.12 there is one group per unit.
@uses((f"{_STATE}:._fsdp_param_groups", None, f"{_STATE}:._fsdp_param_group"), f"{_PARAMETER}:FSDPParam")
def managed_parameters(model: torch.nn.Module) -> list[FSDPParam]:
    """Return torch's objects for the sharded parameters."""
    from torch.distributed.fsdp import FSDPModule

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state_of(module)
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                found += group.fsdp_params if group is not None else ()
    return found


@uses(f"{_PARAMETER}:.mesh_info", f"{_COMMON}:.shard_mesh_dim", f"{_COMMON}:.replicate_mesh_dim")
def meshes_of_shards(model: torch.nn.Module) -> list[tuple[DeviceMesh, int | None, int | None]]:
    """Return the meshes over which ``fully_shard`` reduces gradients, with their sharding and replicating axes."""
    found = {id(record.mesh_info.mesh): record.mesh_info for record in managed_parameters(model)}
    return [(info.mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)) for info in found.values()]


@uses(f"{_PARAMETER}:.mesh_info", f"{_COMMON}:FSDPMeshInfo", f"{_COMMON}:HSDPMeshInfo")
def reduce_within_shards(model: torch.nn.Module) -> Restore:
    """Reduce gradients over shards, and not over replicas of shards; return a function that undoes it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    infos = [parameter.mesh_info for parameter in managed_parameters(model)]
    hybrid: list[Any] = [info for info in infos if isinstance(info, HSDPMeshInfo)]

    def become(kind: type[FSDPMeshInfo]) -> None:
        for info in hybrid:  # by its class torch decides whether to all-reduce; parameters share the object
            info.__class__ = kind

    become(FSDPMeshInfo)
    return lambda: become(HSDPMeshInfo)


@uses(f"{_PARAMETER}:.sharded_param")
def sharded_parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters whose gradients ``fully_shard`` reduces."""
    return [record.sharded_param for record in managed_parameters(model)]


@_uses_unsharded_gradients
def snapshot_sharded_gradients(model: torch.nn.Module, snapshot: Snapshot) -> Restore:
    """Copy the gradients under ``fully_shard``, including unsharded ones; return a function that restores them."""
    managed = managed_parameters(model)
    accumulated = [(p, _copy(p.unsharded_accumulated_grad)) for p in managed if _ACCUMULATED in vars(p)]
    held = [kept for p in managed for kept in (p.sharded_param, getattr(p, "_unsharded_param", None))]
    # Before the first forward there are no unsharded parameters; afterwards the model has either kind.
    parameters = dict.fromkeys([*(parameter for parameter in held if parameter is not None), *model.parameters()])
    restore_others = snapshot(parameters)

    def restore() -> None:
        for parameter in managed_parameters(model):
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
        restore_others()
        for parameter, gradient in accumulated:
            parameter.unsharded_accumulated_grad = gradient

    return restore


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Reshard every unit of FSDP 1 or 2, also those that a forward has left unsharded."""
    reshard_units(unit for module in modules for unit in module.modules())


@uses((f"{_RUNTIME}:_reshard", "state, handle, free_unsharded_flat_param"), f"{_FLAT}:._local_shard")
def reshard_units(units: Iterable[torch.nn.Module]) -> None:
    """Reshard those of ``units`` that are of FSDP 1 or 2; units inside of them have to be given too."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _reshard

    for unit in units:
        if isinstance(unit, FSDPModule):
            unit.reshard()
        elif isinstance(unit, FullyShardedDataParallel):
            handle = unit._handle  # without a local shard it isn't begun
            if handle and handle.uses_sharded_strategy and getattr(handle.flat_param, "_local_shard", None) is not None:
                _reshard(unit, handle, True)


@uses(f"{_PARAMETER}:.sharded_param")
def reshard_beside_gradients(unit: torch.nn.Module) -> None:
    """Reshard ``unit`` after every forward without a graph while it has gradients.

    Torch leaves the root unsharded. Its ``parameters()`` then have no gradients, because those are of the shards.
    """
    records, units = managed_parameters(unit), units_of([unit])

    def after_forward(*_: object) -> None:
        if not torch.is_grad_enabled() and any(record.sharded_param.grad is not None for record in records):
            for one in units:
                one.reshard()

    unit.register_forward_hook(cast("Callable[..., None]", torch.compiler.disable(after_forward)))


@uses(f"{_PARAMETER}:._unsharded_param", f"{_PARAMETER}:.sharded_param")
def shard_of_unsharded(modules: Iterable[torch.nn.Module]) -> dict[torch.Tensor, torch.Tensor]:
    """Return the shard of each unsharded parameter that torch has created."""
    found = ((getattr(record, "_unsharded_param", None), record.sharded_param) for record in _records(modules))
    return {unsharded: shard for unsharded, shard in found if unsharded is not None}


def unshard_once(modules: Iterable[torch.nn.Module]) -> None:
    """Unshard and reshard every unit under ``fully_shard``, to create its unsharded parameters; a collective.

    Torch creates them at the first unshard.
    """
    for unit in units_of(modules):
        unit.unshard()
        unit.reshard()


def unsharded_parameters(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters that autograd knows, each after its shard; a collective."""
    unshard_once([model])
    return [(shard, unsharded) for unsharded, shard in shard_of_unsharded([model]).items()]


# Up to torch 2.14, an unsharded gradient of another dtype than its parameter moves to an attribute beside it. From
# torch 2.15 on it stays on the unsharded parameter, and the attribute only returns it.
@_uses_unsharded_gradients
def unsharded_gradients(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the unsharded gradients of passes without reduction, each after its parameter's shard.

    Afterwards every unit is sharded, as between training passes.
    """
    modules = list(modules)
    reshard(modules)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for record in _records(modules):
        unsharded = getattr(record, "_unsharded_param", None)
        gradient = vars(record).get(_ACCUMULATED)
        if gradient is None and unsharded is not None:
            gradient = unsharded.grad
        if gradient is not None:
            found.append((record.sharded_param, gradient))
    return found


@_uses_unsharded_gradients
def set_unsharded_gradients(
    modules: Iterable[torch.nn.Module], gradient_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
) -> None:
    """Set every parameter's unsharded gradient to ``gradient_of(shard, unsharded)``; None clears it.

    The next backward pass adds to it. Parameters that were never unsharded are skipped.
    """
    for record in _records(modules):
        unsharded = getattr(record, "_unsharded_param", None)
        gradient = None if unsharded is None else gradient_of(record.sharded_param, unsharded)
        if _ACCUMULATED in vars(record):
            record.unsharded_accumulated_grad = gradient
            gradient = None
        if unsharded is not None:
            unsharded.grad = gradient


def units_of(modules: Iterable[torch.nn.Module]) -> list[FSDPModule]:
    """Return the units under ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule

    return [unit for module in modules for unit in module.modules() if isinstance(unit, FSDPModule)]


def _records(modules: Iterable[torch.nn.Module]) -> list[FSDPParam]:
    return list({id(record): record for module in modules for record in managed_parameters(module)}.values())


@uses(f"{_STATE}:._is_root")
def reset_sharded_runtime(model: FSDPModule) -> None:
    """Reset FSDP's runtime state: every unit is resharded and expects a forward."""
    if _state_of(model)._is_root is not None:  # else there was no forward yet
        model.reset_iter_state()


@uses(f"{_STATE}:._comm_ctx", f"{_GROUP}:.post_forward_order")
def awaits_backward(model: FSDPModule) -> bool:
    """Return whether ``model`` or a unit in it had a forward after its last backward."""
    return bool(getattr(_state_of(model)._comm_ctx, "post_forward_order", ()))  # made by the first forward


@uses(f"{_STATE}:FSDPState._root_post_backward_final_callback")
def reduce_sharded_gradients(stage: FSDPModule) -> None:
    """Reduce-scatter the gradients of a pipeline stage, as torch does after the backward of a batch."""
    finalize: Callable[[], None] | None = getattr(stage, "finalize_backward", None)
    if finalize is None:
        _state_of(stage)._root_post_backward_final_callback()
        return
    # From torch 2.15 on the callback reduces nothing in a stage: a stage turns on manual finalization in its forward.
    finalize()


@uses(f"{_STATE}:._mp_policy")
def mixed_precision_policy(module: FSDPModule) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy of the unit."""
    return _state_of(module)._mp_policy


@uses("torch.nn.modules.module:._forward_hooks", "torch.nn.modules.module:._forward_pre_hooks")
def suspend_fsdp_hooks(module: Any) -> Restore:
    """Remove the unit's own unshard and reshard hooks; return a function that restores them."""
    state = _state_of(module)
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        removed.append((hooks, dict(hooks)))
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
            del hooks[key]

    def restore() -> None:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)

    return restore


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
