"""What runs around a module's forward: weights come, inputs move, weights go.

- `base`: what a hook is, and how one is put around a forward; `align`: weights and inputs on one device.
- `attach`: hooks for a whole model; `stages`: whole models that take turns on a device.
- `casting`: small dtypes for storage; `values`: the weights of a model whose weights are elsewhere.

Libraries find the classes in this module by name, and rebuild a hook from the attributes that are named like
parameters of its constructor.
"""

from __future__ import annotations

from .align import AlignDevicesHook
from .attach import attach_align_device_hook, attach_align_device_hook_on_blocks, attach_execution_device_hook
from .base import (
    ModelHook,
    SequentialHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from .casting import LayerwiseCastingHook
from .stages import CpuOffload, UserCpuOffloadHook

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
