"""Move one tensor of a module to a device, and keep its class and its ties. Internal."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from os import PathLike
from typing import Any, cast

import torch
from torch import nn

from ..devices.memory import clear_device_cache
from ..devices.table import CPU, available_kind
from ..errors import PreparationError
from .offload import Entry, offload_weight
from .sizes import Device, as_device

#: Address of a tensor -> device -> its single copy on that device.
TiedCopies = MutableMapping[int, dict[torch.device, torch.Tensor]]

#: Parameter classes, by name, whose values don't have the shape of the weight they stand for.
_PACKED = frozenset({"Params4bit", "FP4Params"})
#: Parameter classes, by name, that quantise when they move to a device, from values in ordinary precision.
_QUANTISE_ON_MOVE = frozenset({"Int8Params", *_PACKED})
#: Tensor classes, by name, that carry quantised values themselves and are assigned as they are.
_QUANTISED = frozenset({"QTensor", "QBitsTensor", "QBytesTensor", "AffineQuantizedTensor", "TorchAOBaseTensor"})


def owner_and_name(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor with a dotted name, and its name in it.

    Raises:
        PreparationError: there is no such tensor.
    """
    owner: Any = module
    path, _, own = tensor_name.rpartition(".")
    for part in path.split(".") if path else ():
        owner = owner._modules.get(part)
        if owner is None:
            raise PreparationError(f"{type(module).__name__} has no part {path!r}, which should hold {own!r}.")
    if own not in owner._parameters and own not in owner._buffers:
        raise PreparationError(f"{tensor_name!r} is no parameter and no buffer of {type(module).__name__}.")
    return owner, own


def rebuild_parameter(old: torch.Tensor, value: torch.Tensor, *, requires_grad: bool | None = None) -> torch.Tensor:
    """Return a parameter with the class, attributes and ``requires_grad`` of ``old`` and the values ``value``."""
    wants_grad = old.requires_grad if requires_grad is None else requires_grad
    wants_grad = wants_grad and (value.is_floating_point() or value.is_complex())
    if type(old) is nn.Parameter:
        new = nn.Parameter(value, requires_grad=wants_grad)
    else:
        known = inspect.signature(type(old).__new__).parameters
        options = {name: each for name, each in vars(old).items() if name in known}
        new = cast(Any, type(old))(value, **{**options, "requires_grad": wants_grad})
    for name, each in vars(old).items():
        if name not in vars(new):
            setattr(new, name, each)
    return new


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedCopies | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move the named parameter or buffer to ``device``, with the values ``value`` if given.

    It keeps its class, its ``requires_grad`` and, unless ``dtype`` is given, its dtype. With ``tied_params_map``, tied
    tensors stay tied on the new device.

    Raises:
        PreparationError: there is no such tensor, its shape differs, or it has no values to move.
    """
    owner, name = owner_and_name(module, tensor_name)
    is_buffer = name in owner._buffers
    tensors = cast("dict[str, torch.Tensor | None]", owner._buffers if is_buffer else owner._parameters)
    old = tensors[name]
    target = as_device(device)
    if old is None:
        if value is not None:
            tensors[name] = _converted(value, None, dtype).to(target, non_blocking=non_blocking)
        return
    tied_to = _address_in(tied_params_map, old if value is None else value)
    shared = tied_params_map[tied_to].get(target) if tied_params_map is not None and tied_to is not None else None
    if shared is not None:
        tensors[name] = shared
        return
    _check(old, value, target, tensor_name, module)
    if value is None and old.device == target and dtype is None:
        new = old
    else:
        # Convert before the move, so that the device never holds both. Callers that want the smaller transfer move the
        # tensor first.
        with torch.no_grad():
            new = _moved(old, value, dtype, target, fp16_statistics, non_blocking, is_buffer)
    tensors[name] = new
    if tied_params_map is not None and tied_to is not None:
        tied_params_map[tied_to][target] = new
    if clear_cache and target.type not in (CPU.name, "meta") and new is not old:
        clear_device_cache()


def _address_in(tied: Mapping[int, object] | None, tensor: torch.Tensor) -> int | None:
    if not tied or tensor.is_meta:
        return None
    address = tensor.data_ptr()
    return address if address in tied else None


def _check(old: torch.Tensor, value: torch.Tensor | None, target: torch.device, name: str, module: nn.Module) -> None:
    if value is None:
        if old.is_meta and target.type != "meta":
            raise PreparationError(
                f"{name} of {type(module).__name__} is on the meta device, which holds no values: give `value` to put "
                f"it on {target}."
            )
        return
    if old.shape != value.shape and type(old).__name__ not in _PACKED:
        raise PreparationError(
            f"{name} of {type(module).__name__} has shape {tuple(old.shape)}, and the value given has "
            f"{tuple(value.shape)}: this looks like the checkpoint of another model."
        )


def _converted(value: torch.Tensor, old: torch.Tensor | None, dtype: str | torch.dtype | None) -> torch.Tensor:
    """Return ``value`` in ``dtype`` if given (floats only), else in the dtype of ``old``."""
    if dtype is not None:
        wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        return value.to(wanted) if value.is_floating_point() or value.is_complex() else value
    return value if old is None else value.to(old.dtype)


def _moved(
    old: torch.Tensor,
    value: torch.Tensor | None,
    dtype: str | torch.dtype | None,
    target: torch.device,
    statistics: torch.Tensor | None,
    non_blocking: bool,
    is_buffer: bool,
) -> torch.Tensor:
    kind = type(old).__name__
    if value is None:
        source = old if is_buffer else old.data
        source = _converted(source, None, dtype)
    elif type(value).__name__ in _QUANTISED or kind in _QUANTISE_ON_MOVE:
        source = value
    else:
        source = _converted(value, old, dtype)
    if kind in _QUANTISE_ON_MOVE:
        return _quantised(old, source, target, statistics, non_blocking)
    moved = source.to(target, non_blocking=non_blocking)
    if is_buffer:
        return moved
    return rebuild_parameter(old, moved)


def _quantised(
    old: torch.Tensor, source: torch.Tensor, target: torch.device, statistics: torch.Tensor | None, non_blocking: bool
) -> torch.Tensor:
    """Return a bitsandbytes parameter on ``target``; values in ordinary precision are quantised by the move."""
    if statistics is not None:  # int8 values that were quantised before, with the scale of each row
        new: Any = rebuild_parameter(old, source.to(target, non_blocking=non_blocking), requires_grad=False)
        new.CB, new.SCB = new.data, statistics.to(target, non_blocking=non_blocking)
        return new
    new = rebuild_parameter(old, source, requires_grad=False)
    return new.to(target, non_blocking=non_blocking)


# --------------------------------------------------------------------------------------------------
# bitsandbytes: 8-bit weights, written to an offload folder with the scale of each row


def quantizing_device() -> Device:
    """Return the device that quantises weights: this process's accelerator, else the CPU."""
    return CPU.name if available_kind() is CPU else torch.accelerator.current_device_index()


def is_quantised_on_move(parameter: torch.Tensor) -> bool:
    """Return whether bitsandbytes converts this parameter to 8 bits when it moves to a device."""
    return type(parameter).__name__ == "Int8Params"


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | PathLike[str],
    offload_index: MutableMapping[str, Entry],
    fp16_statistics: torch.Tensor | None = None,
) -> None:
    """Write a weight and its row scales to the offload folder in 8 bits; leave it on the meta device.

    With ``fp16_statistics``, which are the scales, ``param`` is in 8 bits already.
    """
    index: Any = offload_index
    scales = fp16_statistics
    if scales is None:
        value = param.to(new_dtype)
        set_module_tensor_to_device(model, param_name, quantizing_device(), value=value, clear_cache=False)
        parameter: Any = model.get_parameter(param_name)
        param, scales = parameter.data, getattr(parameter, "SCB", None)
    offload_weight(param.detach().to(CPU.name), param_name, offload_folder, index=index)
    if scales is not None:
        offload_weight(scales.to(CPU.name), param_name.replace("weight", "SCB"), offload_folder, index=index)
    empty = torch.empty(param.shape, dtype=new_dtype, device="meta")
    set_module_tensor_to_device(model, param_name, "meta", value=empty, clear_cache=False)


def drop_8bit_weight(layer: nn.Module, parameter: torch.Tensor) -> None:
    """Drop the 8-bit weight that a bitsandbytes layer keeps from its forward."""
    state: Any = getattr(layer, "state", None)
    if state is not None and is_quantised_on_move(parameter):
        state.CB = state.SCB = None
