"""What torch keeps of a pass over shards, between passes and after one that was given up.

The only place that looks behind torch's interface for it; ``tests/multi/test_shard_passes.py`` says so if
torch changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from .base import remember_gradients

_SAVED = "_saved_grad_shard"  # sharded gradients from before passes without reduction; or the attribute isn't there
_HOOK = "_post_backward_hook_state"
_QUEUED = "_post_backward_callback_queued"


def remember_shards(model: FSDPModule) -> Callable[[], None]:
    """What puts the gradients under ``fully_shard`` back as they are now, those left whole on this rank included."""
    assert isinstance(model, torch.nn.Module)
    managed = list(_managed(model))
    accumulated = [(p, _copy(p.unsharded_accumulated_grad)) for p in managed]
    held = [kept for p in managed for kept in (p.sharded_param, getattr(p, "_unsharded_param", None))]
    # Before the first forward there are no whole parameters, and afterwards either kind is what the model shows.
    parameters = dict.fromkeys([*(parameter for parameter in held if parameter is not None), *model.parameters()])
    put_back_others = remember_gradients(parameters)

    def put_back() -> None:
        for parameter in _managed(model):
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
        put_back_others()
        for parameter, gradient in accumulated:
            parameter.unsharded_accumulated_grad = gradient

    return put_back


def abandon_shards(model: FSDPModule) -> None:
    """Every unit is sharded, and waits for a forward."""
    if model._get_fsdp_state()._is_root is not None:  # else no forward has come as far as that
        model.reset_iter_state()


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _managed(model: torch.nn.Module) -> Iterator[Any]:
    """torch's records of the parameters that are sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


# ------------------------------------------------------------------------------------------ flat parameters


def remember_flat(root: FullyShardedDataParallel) -> Callable[[], None]:
    """What puts the gradients of flat parameters back as they are now, those left whole on this rank included."""
    flats = [handle.flat_param for _, handle in _handles(root)]
    own = dict.fromkeys(p for flat in flats for p in (flat, *(flat._params or ()), *(flat._shared_params or ())))
    put_back_others = remember_gradients(parameter for parameter in root.parameters() if parameter not in own)
    # The gradients of the user's own parameters are views into those of the flat ones, whose values are copied.
    views = [(parameter, None if parameter.grad is None else parameter.grad.data) for parameter in own]
    saved = [(flat, getattr(flat, _SAVED, None)) for flat in flats]
    masks = [(flat, flat._is_grad_none_mask and list(flat._is_grad_none_mask)) for flat in flats]
    values = [(t, t.clone()) for t in (*(flat.grad for flat in flats), *(t for _, t in saved)) if t is not None]
    values = [(tensor.data, copy) for tensor, copy in values]

    def put_back() -> None:
        put_back_others()
        for tensor, copy in values:
            tensor.copy_(copy)
        for parameter, gradient in views:
            _give(parameter, gradient)
        for flat, gradient in saved:
            flat.__dict__.pop(_SAVED, None)
            if gradient is not None:
                setattr(flat, _SAVED, gradient)
        for flat, mask in masks:
            flat._is_grad_none_mask = mask

    return put_back


def _give(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """``parameter.grad`` is ``gradient``, which may be whole where the parameter is a piece, as torch has it too."""
    if gradient is not None and (gradient.shape, gradient.dtype) != (parameter.shape, parameter.dtype):
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.data = gradient
    else:
        parameter.grad = gradient


def abandon_flat(root: FullyShardedDataParallel) -> None:
    """Every unit is sharded, and waits for a forward."""
    if root._is_root is None:  # no forward has come as far as that
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
        handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
        handle._post_forward_index = None
        state._unshard_event = None
    for state in root._all_fsdp_states:
        state.training_state = TrainingState.IDLE
    setattr(root, _QUEUED, False)
    root._exec_order_data.handles_post_forward_order.clear()


def _handles(root: FullyShardedDataParallel) -> Iterator[tuple[Any, Any]]:
    """torch's records of the units that hold parameters, and of their flat parameters."""
    for state in FullyShardedDataParallel.fsdp_modules(root):
        if state._handle is not None:
            yield state, state._handle
