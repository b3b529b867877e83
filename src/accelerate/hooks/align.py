"""Weights and inputs of a module on one device while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn

from ..device_map.int8 import forget_in_8bit
from ..device_map.place import TiedCopies, owner_and_name, rebuilt, set_module_tensor_to_device
from ..device_map.tensors import Device, as_device, named_module_tensors
from ..devices import CPU
from ..errors import PreparationError
from ..nested import find_device, send_to_device
from ..offload import OffloadedWeightsLoader, PrefixedDataset
from .base import ModelHook

META = torch.device("meta")
_as_device = lru_cache(maxsize=64)(as_device)
_NEVER_MOVE: Final = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


def _all_there(items: Iterable[Any], device: torch.device) -> bool:
    """Whether nothing in ``items`` has to move to ``device``."""
    # A loop and exact types first, because this runs before every module of a dispatched model: to ask anything else
    # whether it is a tensor takes longer than all the rest.
    for item in items:
        kind = type(item)
        if kind is torch.Tensor:
            if item.device != device:
                return False
        elif kind in _NEVER_MOVE:
            continue
        elif kind is tuple or kind is list or (kind is not dict and isinstance(item, (tuple, list))):
            if not _all_there(item, device):
                return False
        elif kind is dict or isinstance(item, Mapping):
            if not _all_there(item.values(), device):
                return False
        elif isinstance(item, torch.Tensor):
            if item.device != device:
                return False
        elif getattr(item, "to", None) is not None:
            return False
    return True


def sent(data: Any, device: Device | None, skip_keys: str | list[str] | None = None) -> Any:
    """``data`` with its tensors on ``device``; the very same object where they are there already."""
    if device is None:
        return data
    target = device if isinstance(device, torch.device) else _as_device(device)
    if _all_there((data,), target):
        return data
    return send_to_device(data, target, skip_keys=skip_keys)


class AlignDevicesHook(ModelHook):
    """The module runs on ``execution_device``: its inputs move there, and with ``offload`` its weights too, for as long
    as it runs.

    Args:
        execution_device: where the module runs; None leaves inputs and weights where they are.
        offload: the weights come from ``weights_map`` before the forward and are gone after it.
        io_same_device: the output goes to the device that the first input came from.
        weights_map: the weights by name; without one, the module's own, kept in host memory.
        offload_buffers: buffers come and go too.
        place_submodules: the hook is for the module and all it holds, not only for its own tensors.
        skip_keys: names of arguments, and of entries in outputs, that never move.
        tied_params_map: address of a tied weight -> device -> the one copy there.
    """

    runs_compiled = False

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        # Every parameter is an attribute of its own name: libraries rebuild hooks from them.
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        #: Where each tensor was before the hook.
        self.original_devices: dict[str, torch.device] = {}
        self.input_device: Any = None
        #: (address, device) of the shared copies that this hook made, and takes away again.
        self.tied_pointers_to_remove: set[tuple[int, torch.device]] = set()
        #: The parameters and buffers without values, which stand in while the weights are away.
        self._placeholders: dict[str, torch.Tensor] = {}
        #: What the weights are read from ahead of their use, and their names there; found when they are first needed.
        self._source: tuple[Any, OffloadedWeightsLoader | None, tuple[str, ...]] = (None, None, ())
        #: Tensors without values that ``weights_map`` doesn't have either.
        self._nowhere: list[str] = []

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """The weights lie on the execution device, or with ``offload`` in ``weights_map`` only."""
        if self.execution_device == META or self.execution_device == "meta":
            self.tied_params_map = None  # nothing has an address there
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                    self._settle(module, name)
            return module
        self.original_devices = {
            name: tensor.device for name, tensor in named_module_tensors(module, recurse=self.place_submodules)
        }
        if self.weights_map is None:
            self.weights_map = {
                name: tensor.detach().to("cpu")
                for name, tensor in named_module_tensors(
                    module, include_buffers=self.offload_buffers, recurse=self.place_submodules
                )
            }
        self._send_away(module)
        return module

    def _settle(self, module: nn.Module, name: str) -> None:
        set_module_tensor_to_device(
            module, name, self.execution_device, tied_params_map=self.tied_params_map, clear_cache=False
        )

    def _send_away(self, module: nn.Module) -> None:
        offloaded = {
            name
            for name, _ in named_module_tensors(
                module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
            )
        }
        weights = self.weights_map
        assert weights is not None
        for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
            known = name in weights
            if name in offloaded and known:
                self._placeholders[name] = self._without_values(module, name)
            elif not tensor.is_meta:  # buffers, and weights that nobody offloaded, stay where the module runs
                if self.execution_device is not None:
                    self._settle(module, name)
            elif known:
                device = "cpu" if self.execution_device is None else self.execution_device
                set_module_tensor_to_device(module, name, device, value=weights[name], clear_cache=False)
            else:
                self._nowhere.append(name)

    def _without_values(self, module: nn.Module, name: str) -> torch.Tensor:
        set_module_tensor_to_device(module, name, META, clear_cache=False)
        owner, own = owner_and_name(module, name)
        placeholder = owner._parameters.get(own)
        placeholder = owner._buffers[own] if placeholder is None else placeholder
        assert placeholder is not None
        return placeholder

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights are there, and the inputs are where they are."""
        if self.io_same_device:
            first = args[0] if args else None
            self.input_device = first.device if isinstance(first, torch.Tensor) else find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        device = _as_device(self.execution_device)
        if args and not _all_there(args, device):
            args = send_to_device(args, device)
        if kwargs and not _all_there(kwargs.values(), device):
            kwargs = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return args, kwargs

    def _bring(self, module: nn.Module) -> None:
        weights = self.weights_map
        assert weights is not None
        if self._nowhere:
            raise PreparationError(
                f"{type(module).__name__} can't run: {', '.join(self._nowhere)} are on the meta device, and what its "
                "weights are loaded from doesn't have them. Load the whole checkpoint before the model is dispatched."
            )
        device = _as_device("cpu" if self.execution_device is None else self.execution_device)
        loader, unit = self._read_ahead(device)
        if loader is None:
            for name, placeholder in self._placeholders.items():
                self._put(module, name, placeholder, weights[name], device)
            return
        values = loader.ahead.fetch(unit, device)
        for (name, placeholder), value in zip(self._placeholders.items(), values, strict=True):
            self._put(module, name, placeholder, value, device)

    def _read_ahead(self, device: torch.device) -> tuple[OffloadedWeightsLoader | None, tuple[str, ...]]:
        """The source that reads these weights ahead, where that is worth it, and their names there."""
        weights = self.weights_map
        if self._source[0] is not weights:  # first asked for, or replaced by a library
            loader = weights.dataset if isinstance(weights, PrefixedDataset) else None
            unit: tuple[str, ...] = ()
            if isinstance(weights, PrefixedDataset) and isinstance(loader, OffloadedWeightsLoader):
                unit = tuple(f"{weights.prefix}{name}" for name in self._placeholders)
                tied = self.tied_params_map or {}
                if any(loader.address(key) in tied for key in unit) or not loader.needs_reading(unit, device):
                    loader = None
            else:
                loader = None
            self._source = (weights, loader, unit)
        return self._source[1:]

    def _put(
        self, module: nn.Module, name: str, placeholder: torch.Tensor, value: torch.Tensor, device: torch.device
    ) -> None:
        copies = self.tied_params_map.get(value.data_ptr()) if self.tied_params_map and not value.is_meta else None
        if copies is not None and device not in copies:
            self.tied_pointers_to_remove.add((value.data_ptr(), device))
        if copies is None and type(placeholder) in (nn.Parameter, torch.Tensor) and value.shape == placeholder.shape:
            owner, own = _owner(module, name)
            # To the host a copy has to be complete when it is used; elsewhere the device's own queue sees to that.
            here = value.to(device=device, dtype=placeholder.dtype, non_blocking=device.type != CPU.name)
            if own in owner._parameters:
                owner._parameters[own] = rebuilt(placeholder, here)  # pyright: ignore[reportArgumentType]
            else:
                owner._buffers[own] = here
            return
        statistics = None
        if value.dtype is torch.int8 and self.weights_map is not None and "weight" in name:
            statistics = self.weights_map.get(name.replace("weight", "SCB"))
        set_module_tensor_to_device(
            module,
            name,
            device,
            value=value,
            fp16_statistics=statistics,
            tied_params_map=self.tied_params_map,
            clear_cache=False,
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """The weights are gone again, and the output is where the caller wants it."""
        if self.offload:
            for name, placeholder in self._placeholders.items():
                owner, own = _owner(module, name)
                if own in owner._parameters:
                    if type(placeholder) is not nn.Parameter:
                        forget_in_8bit(owner, placeholder)
                    owner._parameters[own] = placeholder  # pyright: ignore[reportArgumentType]
                elif own in owner._buffers:
                    owner._buffers[own] = placeholder
            for address, device in self.tied_pointers_to_remove:
                if self.tied_params_map is not None:
                    self.tied_params_map.get(address, {}).pop(device, None)
            self.tied_pointers_to_remove.clear()
            _, loader, unit = self._source
            if loader is not None:
                loader.release(unit)
        if self.io_same_device and self.input_device is not None:
            return sent(output, self.input_device, self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """The weights are where they were before the hook."""
        if not self.offload:
            return module
        for name, device in self.original_devices.items():
            if device != META:
                value = self._kept(name) if name in self._placeholders else None
                set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
        return module

    def _kept(self, name: str) -> torch.Tensor:
        """The weight for the module to keep: what is read in place gets memory of its own."""
        assert self.weights_map is not None
        value, source = self.weights_map[name], getattr(self.weights_map, "dataset", self.weights_map)
        return value.clone() if isinstance(source, OffloadedWeightsLoader) else value


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    return owner_and_name(module, name) if "." in name else (module, name)
