"""Hooks for a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..device_map.place import TiedCopies
from ..device_map.tensors import named_module_tensors
from ..offload import PrefixedDataset
from .align import AlignDevicesHook
from .base import add_hook_to_module

SkipKeys = str | list[str] | None


def _holds_tensors(module: nn.Module) -> bool:
    return next(named_module_tensors(module), None) is not None


def _is_hooked(module: nn.Module) -> bool:
    return "_hf_hook" in module.__dict__


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Any,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Every module that holds tensors and has no hook yet gets its inputs on ``execution_device``.

    The inside of a module whose class is in ``preload_module_classes`` is left alone.
    """
    if not _is_hooked(module) and next(named_module_tensors(module, recurse=True), None) is not None:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Every module that holds tensors of its own gets a hook that brings them while it runs.

    A module whose class is in ``preload_module_classes`` brings all that is inside it at once.
    """
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    if _holds_tensors(module) or whole:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool | dict[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Every block runs on its device, and those that are offloaded bring their weights while they run.

    ``execution_device`` and ``offload`` are one value for all, or a value for each block by name.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        _attach_to_whole(
            module,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
        return
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(offload, execution_device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    is_root = module_name == ""
    if module_name in devices and module_name in offloads:
        _attach_to_block(
            module,
            devices[module_name],
            offloads[module_name],
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
    elif is_root:
        hook = AlignDevicesHook(
            devices.get(""), io_same_device=True, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child,
            devices,
            offloads,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def _attach_to_whole(
    module: nn.Module,
    execution_device: Any,
    offload: bool,
    weights_map: Mapping[str, Any] | None,
    offload_buffers: bool,
    module_name: str,
    skip_keys: SkipKeys,
    preload_module_classes: list[str] | None,
    tied_params_map: TiedCopies | None,
) -> None:
    """One device and one answer for the whole module."""
    if not offload:
        hook = AlignDevicesHook(
            execution_device,
            io_same_device=True,
            place_submodules=True,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook)
        return
    attach_align_device_hook(
        module,
        execution_device,
        True,
        weights_map,
        offload_buffers,
        module_name,
        skip_keys,
        preload_module_classes,
        tied_params_map,
    )


def _attach_to_block(
    module: nn.Module,
    execution_device: Any,
    offload: bool,
    weights_map: Mapping[str, Any] | None,
    offload_buffers: bool,
    module_name: str,
    skip_keys: SkipKeys,
    preload_module_classes: list[str] | None,
    tied_params_map: TiedCopies | None,
) -> None:
    is_root = module_name == ""
    common: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if offload:
        holds = _holds_tensors(module)
        if is_root or not holds:
            # Before the hook that moves the inputs: it has to see where they came from.
            hook = AlignDevicesHook(None if holds else execution_device, io_same_device=is_root, **common)
            add_hook_to_module(module, hook, append=True)
        attach_align_device_hook(
            module,
            execution_device,
            True,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
    else:
        hook = AlignDevicesHook(
            execution_device,
            offload_buffers=offload_buffers,
            io_same_device=is_root,
            place_submodules=True,
            **common,
        )
        add_hook_to_module(module, hook)
    attach_execution_device_hook(module, execution_device, skip_keys, preload_module_classes, tied_params_map)
