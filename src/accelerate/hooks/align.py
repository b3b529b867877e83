"""Hooks that move a module's weights and inputs to one device, while it runs or until another model runs. Internal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn

from ..big_models.offload import OffloadedWeightsLoader, PrefixedDataset
from ..big_models.placement import (
    TiedCopies,
    drop_8bit_weight,
    owner_and_name,
    rebuild_parameter,
    set_module_tensor_to_device,
)
from ..big_models.sizes import Device, as_device, named_module_tensors
from ..devices.memory import clear_device_cache
from ..devices.table import CPU, available_kind
from ..distributed.world import current_world
from ..errors import CheckpointError, PreparationError
from ..nested import find_device, send_to_device
from ..torch_private.modules import save_own
from .base import ModelHook, SequentialHook, remove_hook_from_module

META = torch.device("meta")
_as_device = lru_cache(maxsize=64)(as_device)
_NEVER_MOVE: Final = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})


def _all_on_device(items: Iterable[Any], device: torch.device) -> bool:
    """Return whether all of ``items`` are on ``device`` already, or can't be moved."""
    # Check exact types first, because this runs before every module of a dispatched model, and asking other objects
    # whether they are tensors takes longer than the rest.
    for item in items:
        kind = type(item)
        if kind is torch.Tensor:
            if item.device != device:
                return False
        elif kind in _NEVER_MOVE:
            continue
        elif kind is tuple or kind is list or (kind is not dict and isinstance(item, (tuple, list))):
            if not _all_on_device(item, device):
                return False
        elif kind is dict or isinstance(item, Mapping):
            if not _all_on_device(item.values(), device):
                return False
        elif isinstance(item, torch.Tensor):
            if item.device != device:
                return False
        elif getattr(item, "to", None) is not None:
            return False
    return True


def to_device(data: Any, device: Device | None, skip_keys: str | list[str] | None = None) -> Any:
    """Return ``data`` with its tensors on ``device``; the same object if they are there already."""
    if device is None:
        return data
    target = device if isinstance(device, torch.device) else _as_device(device)
    if _all_on_device((data,), target):
        return data
    return send_to_device(data, target, skip_keys=skip_keys)


class AlignDevicesHook(ModelHook):
    """A hook that runs a module on ``execution_device``: it moves the inputs and, with ``offload``, loads the weights.

    Args:
        execution_device: the device on which the module runs; None moves neither inputs nor weights.
        offload: load the weights from ``weights_map`` before the forward, and drop them after it.
        io_same_device: move the output to the device of the first input.
        weights_map: the weights by name; by default, the module's own, in host memory.
        offload_buffers: offload buffers too.
        place_submodules: apply the hook to all tensors inside the module, and not only to its own.
        skip_keys: names of arguments, and of entries in outputs, that never move.
        tied_params_map: address of a tied weight -> device -> the shared copy on it.
    """

    runs_compiled = False

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedCopies | None = None,
    ) -> None:
        # Every parameter is an attribute of its own name: libraries rebuild hooks from them.
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map: Mapping[str, torch.Tensor] | None = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        #: The device of each tensor before the hook.
        self.original_devices: dict[str, torch.device] = {}
        self.input_device: Device | None = None
        #: (data pointer, device) of the shared copies that this hook created and has to remove.
        self.tied_pointers_to_remove: set[tuple[int, torch.device]] = set()
        #: The meta parameters and buffers in the module while the weights are offloaded.
        self._placeholders: dict[str, torch.Tensor] = {}
        #: The weights map, the loader that prefetches from it, and the names of the weights there.
        self._source: tuple[Any, OffloadedWeightsLoader | None, tuple[str, ...]] = (None, None, ())
        #: Tensors without values that ``weights_map`` doesn't have either.
        self._without_source: list[str] = []

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights to the execution device; with ``offload``, keep them only in ``weights_map``."""
        if self.execution_device == META or self.execution_device == "meta":
            self.tied_params_map = None  # meta tensors have no address
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                    self._move_tensor(module, name, self.execution_device)
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
        self._offload_weights(module)
        return module

    def _move_tensor(self, module: nn.Module, name: str, device: Device) -> None:
        set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map, clear_cache=False)

    def _offload_weights(self, module: nn.Module) -> None:
        offloaded = {
            name
            for name, _ in named_module_tensors(
                module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
            )
        }
        weights = self.weights_map
        assert weights is not None
        for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
            in_weights = name in weights
            if name in offloaded and in_weights:
                self._placeholders[name] = self._without_values(module, name)
            elif not tensor.is_meta:  # buffers, and weights that nobody offloaded, stay where the module runs
                if self.execution_device is not None:
                    self._move_tensor(module, name, self.execution_device)
            elif in_weights:
                device = "cpu" if self.execution_device is None else self.execution_device
                set_module_tensor_to_device(module, name, device, value=weights[name], clear_cache=False)
            else:
                self._without_source.append(name)

    def _without_values(self, module: nn.Module, name: str) -> torch.Tensor:
        set_module_tensor_to_device(module, name, META, clear_cache=False)
        owner, own = owner_and_name(module, name)
        placeholder = owner._parameters.get(own)
        placeholder = owner._buffers[own] if placeholder is None else placeholder
        assert placeholder is not None
        return placeholder

    def pre_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Load the weights, and move the inputs to the execution device."""
        if self.io_same_device:
            first = args[0] if args else None
            self.input_device = first.device if isinstance(first, torch.Tensor) else find_device([args, kwargs])
        if self.offload:
            self._load_weights(module)
        if self.execution_device is None:
            return args, kwargs
        device = _as_device(self.execution_device)
        if args and not _all_on_device(args, device):
            args = send_to_device(args, device)
        if kwargs and not _all_on_device(kwargs.values(), device):
            kwargs = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return args, kwargs

    def _load_weights(self, module: nn.Module) -> None:
        weights = self.weights_map
        assert weights is not None
        if self._without_source:
            raise PreparationError(
                f"{type(module).__name__} can't run: {', '.join(self._without_source)} are on the meta device, and "
                "what its weights are loaded from doesn't have them. Load the whole checkpoint before the model is "
                "dispatched."
            )
        device = _as_device("cpu" if self.execution_device is None else self.execution_device)
        loader, unit = self._prefetch_source(device)
        if loader is None:
            for name, placeholder in self._placeholders.items():
                self._set_tensor(module, name, placeholder, weights[name], device)
            return
        values = loader.prefetcher.fetch(unit, device)
        for (name, placeholder), value in zip(self._placeholders.items(), values, strict=True):
            self._set_tensor(module, name, placeholder, value, device)

    def _prefetch_source(self, device: torch.device) -> tuple[OffloadedWeightsLoader | None, tuple[str, ...]]:
        """Return the loader to prefetch these weights (None: not worth it), and their names in it."""
        weights = self.weights_map
        if self._source[0] is not weights:  # first use, or replaced by a library
            loader = weights.dataset if isinstance(weights, PrefixedDataset) else None
            unit: tuple[str, ...] = ()
            if isinstance(weights, PrefixedDataset) and isinstance(loader, OffloadedWeightsLoader):
                unit = tuple(f"{weights.prefix}{name}" for name in self._placeholders)
                tied = self.tied_params_map or {}
                if any(loader.address(key) in tied for key in unit) or not loader.is_worth_prefetching(unit, device):
                    loader = None
            else:
                loader = None
            self._source = (weights, loader, unit)
        return self._source[1:]

    def _set_tensor(
        self, module: nn.Module, name: str, placeholder: torch.Tensor, value: torch.Tensor, device: torch.device
    ) -> None:
        copies = self.tied_params_map.get(value.data_ptr()) if self.tied_params_map and not value.is_meta else None
        if copies is not None and device not in copies:
            self.tied_pointers_to_remove.add((value.data_ptr(), device))
        if copies is None and type(placeholder) in (nn.Parameter, torch.Tensor) and value.shape == placeholder.shape:
            owner, own = _owner(module, name)
            # A copy to the host must be complete before it is used; on other devices the stream orders copy and use.
            here = value.to(device=device, dtype=placeholder.dtype, non_blocking=device.type != CPU.name)
            if own in owner._parameters:
                owner._parameters[own] = rebuild_parameter(placeholder, here)  # pyright: ignore[reportArgumentType]
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

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Offload the weights again; with ``io_same_device``, move the output to the input's device."""
        if self.offload:
            for name, placeholder in self._placeholders.items():
                owner, own = _owner(module, name)
                if own in owner._parameters:
                    if type(placeholder) is not nn.Parameter:
                        drop_8bit_weight(owner, placeholder)
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
            return to_device(output, self.input_device, self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move the weights back to the devices on which they were before the hook."""
        if not self.offload:
            return module
        for name, device in self.original_devices.items():
            if device != META:
                value = self._value_to_restore(name) if name in self._placeholders else None
                set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
        return module

    def _value_to_restore(self, name: str) -> torch.Tensor:
        """Return the weight to put back into the module; a view of a file is copied."""
        assert self.weights_map is not None
        value, source = self.weights_map[name], getattr(self.weights_map, "dataset", self.weights_map)
        return value.clone() if isinstance(source, OffloadedWeightsLoader) else value


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    return owner_and_name(module, name) if "." in name else (module, name)


# --------------------------------------------------------------------------------------------------
# Access to the weights of offloaded models


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that loads this module's weights; None if there is none."""
    hook: Any = module.__dict__.get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook loads the weights of this module while it runs."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Enter a context in which the module's own tensors have values, on ``execution_device`` if given."""
    hook = offloading_hook(module)
    with ExitStack() as stack:
        if hook is not None:
            stack.enter_context(_weights_loaded(module, hook, execution_device))
        elif execution_device is not None:
            for name, tensor in list(named_module_tensors(module)):
                stack.callback(_restore_tensor, module, name, tensor)
                set_module_tensor_to_device(module, name, execution_device, clear_cache=False)
        yield


def _restore_tensor(module: nn.Module, name: str, before: torch.Tensor) -> None:
    """Put the original tensor back into the module, with the values written to its copy."""
    slots: Any = module._parameters if name in module._parameters else module._buffers
    now = slots[name]
    if now is not before:
        if not now.is_meta and not before.is_meta:
            before.data.copy_(now.data)
        slots[name] = before


@contextmanager
def _weights_loaded(module: nn.Module, hook: AlignDevicesHook, device: Device | None) -> Iterator[None]:
    """Enter a context in which the hook's weights are loaded, on ``device`` if given."""
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
    """Return the state dict, in host memory, of a model with offloaded weights.

    Raises:
        CheckpointError: some weights have no values, neither loaded nor offloaded.
    """
    found: dict[str, object] = {}
    _collect(model, "", found, is_loaded=False)
    state = {name: found.get(name, value) for name, value in model.state_dict().items()}
    missing = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of {type(model).__name__} are on the meta device, and no hook knows their values: "
            f"{', '.join(missing[:10])}. Load or initialise the model first."
        )
    return state


def _collect(module: nn.Module, prefix: str, found: dict[str, object], *, is_loaded: bool) -> None:
    """Add the state of a module and its submodules to ``found``; ``is_loaded``: a parent's hook has loaded it."""
    hook = offloading_hook(module)
    with ExitStack() as stack:
        if hook is not None:
            stack.enter_context(_weights_loaded(module, hook, "cpu"))
        is_loaded = is_loaded or (hook is not None and hook.place_submodules)
        own: dict[str, object] = {}
        save_own(module, own, prefix)
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                # A loaded weight may be a view of a file, so it is copied.
                value = value.detach().to("cpu", copy=hook is not None or is_loaded)
            found[name] = value
        for name, child in module.named_children():
            _collect(child, f"{prefix}{name}.", found, is_loaded=is_loaded)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Fill in the values of this module, called ``module_name``, in ``state_dict``; return ``state_dict``.

    The values are on ``device_to_put_offload``. ``module_name`` may also be the name of one of the module's tensors;
    its last component is then dropped.
    """
    hook = offloading_hook(module)
    if hook is None:
        return state_dict
    owner = module_name.rpartition(".")[0]
    with _weights_loaded(module, hook, device_to_put_offload):
        for name, value in module.state_dict().items():
            for full in (f"{owner}.{name}", f"{module_name}.{name}", name):
                if full in state_dict:
                    state_dict[full] = value.detach().clone()
                    break
    return state_dict


# --------------------------------------------------------------------------------------------------
# Whole models that are moved to the device in turn, when they are called


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
