"""Whole models that take turns on one device, as the stages of a pipeline do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..device_map.tensors import as_device
from ..devices import available_kind
from ..memory import clear_device_cache
from ..world import current_world
from .align import sent
from .base import ModelHook, remove_hook_from_module


def default_device() -> torch.device:
    """The device of this process, else the accelerator that is here, else the host."""
    world = current_world()
    return available_kind().device() if world is None else world.device


class CpuOffload(ModelHook):
    """The model waits in host memory, comes to the device when it is first called, and stays until it is offloaded.

    ``prev_module_hook`` is the hook of the stage before, which is offloaded just before this one comes.
    """

    runs_compiled = False

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """The model is in host memory."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The stage before has left the device, and this one is on it, with its inputs."""
        if not self._is_there(module):
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
                clear_device_cache()
            module.to(self.execution_device)
        return sent(args, self.execution_device), sent(kwargs, self.execution_device)

    def _is_there(self, module: nn.Module) -> bool:
        # The usual case in a loop that generates: nothing moves, and a walk with .to() costs a hundred times more.
        target = as_device(self.execution_device)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device != target and (target.index is not None or tensor.device.type != target.type):
                return False
        return True


class UserCpuOffloadHook:
    """What the user holds of a stage: it can be sent to host memory, and the hook can be taken off."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """The model is in host memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """The model has no hook, and stays where it is."""
        remove_hook_from_module(self.model)
