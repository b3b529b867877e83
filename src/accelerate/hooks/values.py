"""The weights of a model whose weights are elsewhere: asked for, borrowed, or written into a state dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..device_map.place import set_module_tensor_to_device
from ..device_map.tensors import Device, named_module_tensors
from ..errors import CheckpointError
from ..torch_private.modules import save_own
from .align import AlignDevicesHook
from .base import SequentialHook


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook of this module that brings its weights; None where none does."""
    hook: Any = module.__dict__.get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the weights of this module are brought by a hook while it runs."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Within the block the module's own tensors have values, on ``execution_device`` where given."""
    hook = offloading_hook(module)
    with ExitStack() as stack:
        if hook is not None:
            stack.enter_context(_borrowed(module, hook, execution_device))
        elif execution_device is not None:
            for name, tensor in list(named_module_tensors(module)):
                stack.callback(_return, module, name, tensor)
                set_module_tensor_to_device(module, name, execution_device, clear_cache=False)
        yield


def _return(module: nn.Module, name: str, before: torch.Tensor) -> None:
    """The module has the very tensor that it had before, with what was written meanwhile."""
    slots: Any = module._parameters if name in module._parameters else module._buffers
    now = slots[name]
    if now is not before:
        if not now.is_meta and not before.is_meta:
            before.data.copy_(now.data)
        slots[name] = before


@contextmanager
def _borrowed(module: nn.Module, hook: AlignDevicesHook, device: Device | None) -> Iterator[None]:
    """Within the block, the hook has brought its weights, to ``device`` where given."""
    before = hook.execution_device
    if device is not None:
        hook.execution_device = device
    try:
        hook.pre_forward(module)
        yield
    finally:
        hook.post_forward(module, ())
        hook.execution_device = before


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model of which some weights are offloaded, in host memory.

    Raises:
        CheckpointError: some weights have no values anywhere.
    """
    found: dict[str, Any] = {}
    _collect(model, "", found, brought=False)
    state = {name: found.get(name, value) for name, value in model.state_dict().items()}
    missing = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {type(model).__name__} are on the meta device, and no hook knows their values: "
            f"{', '.join(missing[:10])}. Load or initialise the model first."
        )
    return state


def _collect(module: nn.Module, prefix: str, found: dict[str, Any], *, brought: bool) -> None:
    """What the modules from here on save of themselves; ``brought`` where a hook further up has the weights here."""
    hook = offloading_hook(module)
    with ExitStack() as stack:
        if hook is not None:
            stack.enter_context(_borrowed(module, hook, "cpu"))
        brought = brought or (hook is not None and hook.place_submodules)
        own: dict[str, Any] = {}
        save_own(module, own, prefix)
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                # What a hook brought may be a view of a file, so it gets memory of its own.
                value = value.detach().to("cpu", copy=hook is not None or brought)
            found[name] = value
        for name, child in module.named_children():
            _collect(child, f"{prefix}{name}.", found, brought=brought)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """``state_dict`` with the values of this module, whose name is ``module_name``, brought to the device.

    ``module_name`` may also be the name of one of its tensors: its last part is then left away.
    """
    hook = offloading_hook(module)
    if hook is None:
        return state_dict
    owner = module_name.rpartition(".")[0]
    with _borrowed(module, hook, device_to_put_offload):
        for name, value in module.state_dict().items():
            for full in (f"{owner}.{name}", f"{module_name}.{name}", name):
                if full in state_dict:
                    state_dict[full] = value.detach().clone()
                    break
    return state_dict
