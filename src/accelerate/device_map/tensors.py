"""The tensors of a module by name, and the devices they are asked to lie on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..devices import CPU, available_kind
from ..errors import SettingError
from ..torch_private.modules import non_persistent_buffers
from ..torch_private.tracing import identity_of

Device = int | str | torch.device

DISK = "disk"


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the module by name, then its buffers; those of its submodules too with ``recurse``.

    A tensor with several names comes under its first one.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of the buffers that no state dict holds; dotted names with ``fqns``."""
    if not recurse:
        return non_persistent_buffers(module)
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, submodule in module.named_modules()
        for name in non_persistent_buffers(submodule)
    }


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What two tensors over the same memory have in common: device, identity of the storage, its size in bytes."""
    storage = tensor.untyped_storage()
    # Nothing on the meta device has an address, so there the storage object itself is the identity.
    identity = identity_of(storage) if tensor.is_meta else storage.data_ptr()
    return tensor.device, identity, storage.nbytes()


def as_device(device: Device) -> torch.device:
    """The torch device; an integer is the accelerator with that index.

    Raises:
        SettingError: an integer was given, and there is no accelerator here.
    """
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        kind = available_kind()
        if kind is CPU:
            raise SettingError(
                f"Device {device} was asked for, an integer names an accelerator, and this machine has none that torch "
                'can use. Use "cpu" or "disk".'
            )
        return kind.device(device)
    return torch.device(device)


def check_device_same(first_device: Any, second_device: Any) -> bool:
    """Whether both name one device; an accelerator without an index is the one with index 0."""
    first, second = as_device(first_device), as_device(second_device)
    if first.type != second.type:
        return False
    return first.type == CPU.name or (first.index or 0) == (second.index or 0)
