"""Hooks around a module's forward: they load weights, move inputs, and offload weights again.

- `base`: the interface of a hook, and how to put one around a forward; `align`: move weights and inputs to one device,
access offloaded weights, and move whole models in turn.
- `attach`: hooks for a whole model, layer-wise casting, and models with sequences sharded over ranks.

Libraries look up the classes in this module by name, and rebuild a hook from its attributes, which have the names of
its constructor's parameters.
"""

from __future__ import annotations

from .align import AlignDevicesHook, CpuOffload, UserCpuOffloadHook
from .attach import (
    LayerwiseCastingHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from .base import (
    ModelHook,
    SequentialHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "_accelerate_added_attributes",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
