"""Whole models that are moved to the device in turn, when they are called. Internal."""

from __future__ import annotations

import torch
from torch import nn

from ..big_models.sizes import Device, as_device
from ..devices.memory import clear_device_cache
from ..devices.table import available_kind
from ..distributed.world import current_world
from .align import to_device
from .base import ModelHook, remove_hook_from_module


def default_device() -> torch.device:
    """Return the device of this process, else the accelerator of this machine, else the CPU."""
    world = current_world()
    return available_kind().device() if world is None else world.device


class CpuOffload(ModelHook):
    """A hook that keeps a model in host memory until it is called, and then moves it to the device to stay there.

    ``prev_module_hook`` is the hook of the previous model, which is offloaded just before this one is moved.
    """

    runs_compiled = False

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: torch.device | int | str = (
            default_device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to host memory."""
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Offload the previous model and move this one to the device, with its inputs."""
        if not self._is_there(module):
            if self.prev_module_hook is not None:
                self.prev_module_hook.offload()
                clear_device_cache()
            module.to(self.execution_device)
        return to_device(args, self.execution_device), to_device(kwargs, self.execution_device)

    def _is_there(self, module: nn.Module) -> bool:
        # The usual case in a generation loop: nothing moves, and calling .to() would take a hundred times longer.
        target = as_device(self.execution_device)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device != target and (target.index is not None or tensor.device.type != target.type):
                return False
        return True


class UserCpuOffloadHook:
    """The user's handle to a model with a :class:`CpuOffload` hook: it offloads the model and removes the hook."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to host memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook, without moving the model."""
        remove_hook_from_module(self.model)
