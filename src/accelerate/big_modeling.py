"""Models larger than memory: create them without values, dispatch them over devices, offload them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from typing import Any, Literal, TypeVar, final, get_args

import torch
from torch import nn

from .big_models.budget import Bytes, DeviceKey, get_balanced_memory, get_max_memory
from .big_models.device_map import check_device_map, infer_auto_device_map
from .big_models.load import load_checkpoint_in_model, load_onto_devices
from .big_models.offload import Entry, OffloadedWeightsLoader, offload_state_dict, read_index
from .big_models.placement import TiedCopies, rebuild_parameter
from .big_models.sizes import (
    DISK,
    ByteDtype,
    Device,
    as_device,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)
from .devices.table import CPU, KINDS
from .errors import PreparationError, SettingError
from .hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from .hooks.attach import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, attach_context_parallel_hooks, refuse_recurrent_layers
from .settings.env import flag

# Names that libraries import from here.
_attach_context_parallel_hooks = attach_context_parallel_hooks
_refuse_recurrent_layers_under_sequence_parallelism = refuse_recurrent_layers

_log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)
AutoMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]
SkipKeys = str | list[str] | None


# ------------------------------------------------------------------------------------- models without values


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create parameters in the block on the meta device, without values and without memory.

    Buffers have values, unless ``include_buffers`` is true (default: ``ACCELERATE_INIT_INCLUDE_BUFFERS``).
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create parameters in the block, in this thread, on ``device``; with ``include_buffers``, also buffers."""
    if include_buffers is None:
        include_buffers = flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    target = as_device(device)
    if include_buffers:
        with target:
            yield
        return
    with _Registration.onto(target):
        yield


@final
class _Registration:
    """A replacement of ``Module.register_parameter`` that moves parameters to a device chosen per thread.

    torch has no setting for parameters only, so the method is replaced while any thread is in a block. Each thread has
    its own device.
    """

    lock = threading.Lock()
    num_blocks = 0
    original: Any = None
    thread_devices = threading.local()

    @classmethod
    @contextmanager
    def onto(cls, device: torch.device) -> Iterator[None]:
        """Move parameters registered in this block and thread to ``device``."""
        before = getattr(cls.thread_devices, "device", None)
        cls.thread_devices.device = device
        cls._enter()
        try:
            yield
        finally:
            cls._leave()
            cls.thread_devices.device = before

    @classmethod
    def _enter(cls) -> None:
        with cls.lock:
            if cls.num_blocks == 0:
                cls.original = nn.Module.register_parameter
                nn.Module.register_parameter = cls._registering(cls.original)
            cls.num_blocks += 1

    @classmethod
    def _leave(cls) -> None:
        with cls.lock:
            cls.num_blocks -= 1
            if cls.num_blocks == 0:
                nn.Module.register_parameter = cls.original

    @classmethod
    def _registering(cls, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(module, name, param)
            device = getattr(cls.thread_devices, "device", None)
            # A parameter that is already there stays the same object, so that tied weights stay tied.
            if device is not None and param is not None and param.device != device:
                moved: Any = rebuild_parameter(param, param.detach().to(device))
                module._parameters[name] = moved

        return register_parameter


# ------------------------------------------------------------------------------ one device, offloaded weights


def _first_device(model: nn.Module) -> torch.device:
    found = next(model.parameters(), None)
    return torch.device(CPU.name) if found is None or found.is_meta else found.device


def _attach_offload_hooks(
    model: Module,
    execution_device: Device | None,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> Module:
    device = _first_device(model) if execution_device is None else execution_device
    if not isinstance(weights, OffloadedWeightsLoader):
        weights = OffloadedWeightsLoader(state_dict=weights)
    # The first hook, because it records the inputs' device before they move.
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload(
    model: Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> Module:
    """Keep the weights in host memory, and load them to ``execution_device`` only while their module runs."""
    weights = {name: each.detach().to("cpu") for name, each in model.state_dict().items()}
    return _attach_offload_hooks(
        model, execution_device, weights if state_dict is None else state_dict, offload_buffers, preload_module_classes
    )


def disk_offload(
    model: Module,
    offload_dir: str | PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> Module:
    """Keep the weights in files, and load them to ``execution_device`` only while their module runs.

    A folder that already holds the weights of this model is reused; otherwise they are written to it.

    Raises:
        PreparationError: the folder holds the weights of another model.
    """
    state = model.state_dict()
    index = read_index(offload_dir)
    if not index:
        offload_state_dict(offload_dir, state)
    else:
        _check_folder(model, state, index, offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _attach_offload_hooks(model, execution_device, weights, offload_buffers, preload_module_classes)


def _check_folder(
    model: nn.Module, state: Mapping[str, torch.Tensor], index: Mapping[str, Entry], folder: object
) -> None:
    missing = [name for name in state if name not in index]
    other = [
        f"{name} is {tuple(index[name]['shape'])} there and {tuple(each.shape)} here"
        for name, each in state.items()
        if name in index and "shape" in index[name] and list(each.shape) != list(index[name]["shape"])
    ]
    if missing or other:
        what = f"it lacks {', '.join(missing[:5])}" if missing else "; ".join(other[:5])
        raise PreparationError(
            f"{folder} holds the offloaded weights of another model than this {type(model).__name__}: {what}. Give an "
            "empty folder."
        )


def cpu_offload_with_hook(
    model: Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Module, UserCpuOffloadHook]:
    """Keep the model in host memory, move it to the device when it is called, and back by ``hook.offload()``.

    The model of ``prev_module_hook`` is offloaded just before this one is moved to the device.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


# ------------------------------------------------------------------------------------------ dispatched models


def dispatch_model(
    model: Module,
    device_map: Mapping[str, object],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | PathLike[str] | None = None,
    offload_index: Mapping[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> Module:
    """Move every part of the model to its device; load parts on cpu and disk to ``main_device`` while they run.

    Weights on disk are read from ``offload_index`` or ``offload_dir``; weights still in the model are first written to
    ``offload_dir``. The model keeps the map as ``hf_device_map``.

    Raises:
        SettingError: the map omits parts, or puts some on disk without a folder for them.
    """
    check_device_map(model, device_map)
    devices = set(device_map.values())
    if len(devices) == 1 and DISK not in devices and not force_hooks and not _refuses_to_move(model):
        _move_to(model, next(iter(devices)))
        return _with_map(model, device_map)
    main: Any = _main_device(device_map) if main_device is None else main_device
    offload_devices = (DISK,) if _is_host(main) else (CPU.name, DISK)
    on_disk = [name or "the whole model" for name, device in device_map.items() if device == DISK]
    if on_disk and offload_dir is None and offload_index is None:
        raise SettingError(
            f"The device map sends {', '.join(on_disk[:5])}{', ...' if len(on_disk) > 5 else ''} to disk: give "
            "`offload_dir`, where their weights are or are to be written, or the `offload_index` of a checkpoint."
        )
    ties = find_tied_parameters(model)
    check_tied_parameters_on_same_device(ties, device_map)
    weights = _offloaded_weights(model, device_map, offload_devices, state_dict, offload_dir, offload_index, ties)
    copies, persistent = _tied_copies(model, ties, weights)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={name: main if device in offload_devices else device for name, device in device_map.items()},
        offload={name: device in offload_devices for name, device in device_map.items()},
        offload_buffers=offload_buffers,
        weights_map=weights,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=copies,
    )
    for address in copies.keys() - persistent:
        # The tensor at this address was moved, and another one may be allocated there.
        del copies[address]
    _retie_on_devices(model, ties)
    _guard_moves(model)
    return _with_map(model, device_map)


def _with_map(model: Module, device_map: Mapping[str, object]) -> Module:
    model.hf_device_map = dict(device_map)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return model


def _refuses_to_move(model: object) -> bool:
    """Return whether bitsandbytes quantised the model, which then can't be moved."""
    quantized = getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_8bit", False)
    return bool(quantized) and "bitsandbytes" in str(getattr(model, "quantization_method", "bitsandbytes")).lower()


def _move_to(model: nn.Module, device: Any) -> None:
    ties = find_tied_parameters(model)
    model.to(as_device(device))
    retie_parameters(model, ties)


def _main_device(device_map: Mapping[str, object]) -> Any:
    return next((device for device in device_map.values() if device not in (CPU.name, DISK)), CPU.name)


def _is_host(device: Device) -> bool:
    """Return whether a device computes in host memory, so that offloading weights to the host would free nothing."""
    kind = as_device(device).type
    return kind == CPU.name or any(row.name == kind and not row.select for row in KINDS)


def _offloaded_weights(
    model: nn.Module,
    device_map: Mapping[str, object],
    offload_devices: tuple[str, ...],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: str | PathLike[str] | None,
    offload_index: Mapping[str, Entry] | None,
    ties: list[list[str]],
) -> OffloadedWeightsLoader | None:
    """Collect the offloaded weights from memory, folder or index; return None if nothing is offloaded."""
    present = model.state_dict()
    names = {device: [name for name in present if device_of(name, device_map) == device] for device in offload_devices}
    if not any(names.values()):
        return None
    in_memory = dict(state_dict or {})
    for name in names.get(CPU.name, ()):
        if name not in in_memory and not present[name].is_meta:
            in_memory[name] = present[name].detach().to("cpu")
    index: dict[str, Entry] = dict(offload_index or {})
    if offload_dir is not None and offload_index is None:
        index = read_index(offload_dir)
        unwritten = {
            name: present[name]
            for name in names.get(DISK, ())
            if name not in index and name not in in_memory and not present[name].is_meta
        }
        if unwritten:
            offload_state_dict(offload_dir, unwritten)
            index = read_index(offload_dir)
    weights = OffloadedWeightsLoader(state_dict=in_memory, save_folder=offload_dir, index=index)
    for group in ties:
        known = next((name for name in group if name in weights), None)
        for name in group if known is not None else ():
            weights.alias(name, known)  # pyright: ignore[reportArgumentType]
    return weights


def _tied_copies(
    model: nn.Module, ties: list[list[str]], weights: OffloadedWeightsLoader | None
) -> tuple[TiedCopies, set[int]]:
    """Return the copies of each tied weight by data pointer and device; and the pointers that stay valid."""
    copies: dict[int, dict[torch.device, torch.Tensor]] = {}
    persistent: set[int] = set()
    for group in ties:
        copies_by_device: dict[torch.device, torch.Tensor] = {}
        for name in group:
            parameter = model.get_parameter(name)
            if not parameter.is_meta:
                copies[parameter.data_ptr()] = copies_by_device
            address = weights.address(name) if weights is not None and name in weights else None
            if address is not None:
                copies[address] = copies_by_device
                persistent.add(address)
    return copies, persistent


def _retie_on_devices(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie weights again if their tied names are on the same device."""
    for group in ties:
        devices: dict[torch.device, list[str]] = {}
        for name in group:
            devices.setdefault(model.get_parameter(name).device, []).append(name)
        retie_parameters(model, [names for device, names in devices.items() if device.type != "meta"])


def _guard_moves(model: nn.Module) -> None:
    """Make moving the model by hand log a warning, or raise while some weights are offloaded."""

    def guarded(move: Callable[..., object]) -> Callable[..., object]:
        @wraps(move)
        def wrapper(*args: object, **kwargs: object) -> object:
            _log.warning(
                "You shouldn't move a model that is dispatched using accelerate hooks: its hooks move inputs and "
                "weights themselves. Take the hooks off first, with remove_hook_from_submodules."
            )
            if any(parameter.is_meta for parameter in model.parameters()):
                raise RuntimeError(
                    f"You can't move this {type(model).__name__}: some of its weights are offloaded to the host or to "
                    "disk, and loaded only while their module runs."
                )
            return move(*args, **kwargs)

        return wrapper

    for name in _accelerate_added_attributes:
        move = getattr(model, name, None)
        if callable(move):
            model.__dict__[name] = guarded(move)


def load_checkpoint_and_dispatch(
    model: Module,
    checkpoint: str | PathLike[str],
    device_map: Mapping[str, object] | AutoMap | None = None,
    max_memory: Mapping[DeviceKey, Bytes | str] | None = None,
    no_split_module_classes: str | list[str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: ByteDtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Module:
    """Load a checkpoint into the model and dispatch it; without ``device_map``, only load it.

    ``device_map`` may be text to infer the map: ``"auto"`` and ``"balanced"`` spread the model evenly over the
    accelerators, ``"balanced_low_0"`` keeps the first one as free as possible, ``"sequential"`` fills them in order.
    Weights for disk stay in the checkpoint's own safetensors files.

    Raises:
        SettingError: ``device_map`` is an unknown text.
        CheckpointError: the checkpoint is broken, or belongs to another model.
    """
    del offload_state_dict
    if isinstance(device_map, str):
        options: dict[str, Any] = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
        limits = limits_of_policy(model, device_map, max_memory, **options)
        device_map = infer_auto_device_map(model, limits, offload_buffers=offload_buffers, **options)
    index = load_onto_devices(
        model,
        checkpoint,
        device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        dispatches=device_map is not None,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index=index or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def limits_of_policy(
    model: nn.Module, policy: str, max_memory: Mapping[DeviceKey, Bytes | str] | None, **options: Any
) -> Mapping[DeviceKey, Bytes]:
    """Return the memory of each device that a device map given as text may use; ``options`` size the model's parts.

    Raises:
        SettingError: ``policy`` is an unknown text.
    """
    policies = get_args(AutoMap)
    if policy not in policies:
        raise SettingError(f"device_map={policy!r}: choose one of {', '.join(map(repr, policies))}, or give a mapping.")
    if policy == "sequential":
        return get_max_memory(max_memory)
    return get_balanced_memory(model, max_memory, low_zero=policy == "balanced_low_0", **options)


# ---------------------------------------------------------------------------------------- layer-wise casting


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | list[str] | tuple[str, ...] | None = None,
    skip_modules_classes: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in ``storage_dtype``, and compute in ``compute_dtype``.

    Layers are skipped if their dotted name matches one of the patterns, or if they are inside a module of the given
    classes.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    classes = skip_modules_classes or ()

    def cast(layer: nn.Module, name: str) -> None:
        if isinstance(layer, classes) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(layer, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for own, child in layer.named_children():
            cast(child, f"{name}.{own}" if name else own)

    cast(module, "")


__all__ = [
    "attach_align_device_hook_on_blocks",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
