"""Weights of bitsandbytes in 8 bits, written to an offload folder with the scale of each row."""

from __future__ import annotations

from collections.abc import MutableMapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..devices import CPU, available_kind
from ..offload.folder import Entry, offload_weight
from .place import set_module_tensor_to_device
from .tensors import Device


def quantizing_device() -> Device:
    """Where weights are quantised: the accelerator that this process uses, else the host."""
    return CPU.name if available_kind() is CPU else torch.accelerator.current_device_index()


def is_quantised_on_the_way(parameter: torch.Tensor) -> bool:
    """Whether a parameter is one that bitsandbytes puts into 8 bits when it moves to a device."""
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
    """The weight is in the folder in 8 bits, with the scale of each row; the model has it on the meta device.

    With ``fp16_statistics``, ``param`` is in 8 bits already, and these are the scales.
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
    away = torch.empty(param.shape, dtype=new_dtype, device="meta")
    set_module_tensor_to_device(model, param_name, "meta", value=away, clear_cache=False)


def forget_in_8bit(layer: nn.Module, parameter: torch.Tensor) -> None:
    """A layer of bitsandbytes doesn't hold on to the 8-bit weight that it computed with."""
    state: Any = getattr(layer, "state", None)
    if state is not None and is_quantised_on_the_way(parameter):
        state.CB = state.SCB = None
