"""Hooks around a module's forward: they load weights, move inputs, and offload weights again.

- `base`: the interface of a hook, and how one is put around a forward; `align`: weights and inputs on one device, and
  access to offloaded weights.
- `attach`: hooks for a whole model, and layer-wise casting; `cpu_offload`: whole models that are moved in turn;
  `attention`: models whose sequences are sharded over ranks.

Libraries find the classes in this module by name, and rebuild a hook from the attributes that are named like
parameters of its constructor.
"""

from __future__ import annotations

from .align import AlignDevicesHook
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
from .cpu_offload import CpuOffload, UserCpuOffloadHook

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
