"""Models with linear layers in 8 or 4 bits, quantised while their weights are loaded.

Use bitsandbytes with a :class:`BnbQuantizationConfig`, or torchao with a :class:`TorchAoQuantizationConfig`. Both
compute on the CPU and on accelerators.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from .big_modeling import dispatch_model, init_empty_weights, limits_of_policy
from .big_models.budget import Bytes, DeviceKey
from .big_models.device_map import infer_auto_device_map
from .big_models.load import load_checkpoint_in_model
from .big_models.placement import quantize_and_offload_8bit as quantize_and_offload_8bit
from .big_models.placement import quantizing_device
from .big_models.sizes import DISK, as_device, find_tied_parameters
from .devices.table import CPU, available_kind
from .errors import AccelerateError, CheckpointNotFound, SettingError
from .optional import BNB_4BIT_FLOOR, BNB_8BIT_FLOOR, require
from .plugins.quantization import BnbQuantizationConfig, TorchAoQuantizationConfig

_log = logging.getLogger(__name__)

Quantization = BnbQuantizationConfig | TorchAoQuantizationConfig


class CannotQuantize(AccelerateError, RuntimeError):
    """The error raised if the quantisation library can't compute on this machine."""


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: Quantization,
    weights_location: str | PathLike[str] | None = None,
    device_map: str | Mapping[str, object] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    max_memory: Mapping[DeviceKey, Bytes | str] | None = None,
    offload_folder: str | PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> Any:
    """Quantise the model's linear layers to 8 or 4 bits while a checkpoint is loaded, and dispatch the model.

    Create the model under :func:`init_empty_weights`: then each weight is quantised when it is read, and the full model
    is never in memory in full precision. Skipped modules (by default the head, and modules tied to it) keep
    ``torch_dtype``, or fp32 if the configuration says so.

    Raises:
        MissingDependency: the quantisation library isn't installed, or is too old.
        RuntimeError: it can't compute on this machine, or a model without values has no ``weights_location``.
        SettingError: the device map is wrong, or puts 4-bit layers outside the accelerators.
    """
    config = bnb_quantization_config
    _require_library(config)
    skipped = _skipped(model, config)
    if isinstance(device_map, Mapping) and len(device_map) > 1:
        # Modules that the user placed outside the accelerators aren't converted.
        skipped += [name for name in _offloaded_names(device_map) if name not in skipped]
    is_bnb = isinstance(config, BnbQuantizationConfig)
    model.is_loaded_in_4bit = is_bnb and config.load_in_4bit  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    model.is_loaded_in_8bit = is_bnb and config.load_in_8bit  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    if not any(parameter.is_meta for parameter in model.parameters()):
        return _quantize_loaded(model, config, skipped)
    if weights_location is None:
        raise CheckpointNotFound(
            f"{type(model).__name__} has no values, and `weights_location` doesn't say where they are: give the file "
            "or folder of its checkpoint."
        )
    with init_empty_weights():
        model = _with_layers(model, config, skipped)
    devices = get_quantized_model_device_map(
        model, config, device_map, max_memory=max_memory, no_split_module_classes=no_split_module_classes
    )
    load_checkpoint_in_model(
        model,
        weights_location,
        devices,
        offload_folder=offload_folder,
        dtype=config.torch_dtype,
        offload_state_dict=offload_state_dict,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
        offload_8bit_bnb=is_bnb and config.load_in_8bit,
        loaded=None if is_bnb else _torchao_quantizer(model, config, skipped),
    )
    return dispatch_model(model, devices, offload_dir=offload_folder)


def _require_library(config: Quantization) -> None:
    if isinstance(config, TorchAoQuantizationConfig):
        require("torchao", "fp8", purpose="Quantising a model with TorchAoQuantizationConfig")
        return
    bits, oldest = (8, BNB_8BIT_FLOOR) if config.load_in_8bit else (4, BNB_4BIT_FLOOR)
    purpose = f"Quantising a model to {bits} bits with BnbQuantizationConfig"
    library: Any = require("bitsandbytes", "quantization", purpose=purpose, at_least=oldest)
    here = available_kind().name
    runs_on = set(getattr(library, "supported_torch_devices", None) or {"cuda"})
    if here not in runs_on:
        raise CannotQuantize(
            f"No GPU: this version of bitsandbytes computes on {', '.join(sorted(runs_on))}, and the best device of "
            f"this machine is {here}. Update it, or quantise with TorchAoQuantizationConfig."
        )


def _skipped(model: nn.Module, config: Quantization) -> list[str]:
    names = get_keys_to_not_convert(model) if config.skip_modules is None else list(config.skip_modules)
    kept = config.keep_in_fp32_modules or []
    return [*names, *(name for name in kept if name not in names)]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules to keep in full precision: the last one, and modules with tied weights."""
    tied = [name for group in find_tied_parameters(model) for name in group]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in tied))
    prefix = getattr(model, "base_model_prefix", None)
    if not owners and prefix is not None and getattr(model, prefix, None) is None:
        return []  # a model without a head
    last = [name for name, _ in model.named_children()][-1:]
    return owners + [name for name in last if name not in owners]


def _is_skipped(name: str, skipped: Iterable[str]) -> bool:
    """Return whether a dotted name is a skipped one, is inside one, or contains one as a component."""
    return any(f".{key}." in f".{name}." for key in skipped)


def _offloaded_names(device_map: Mapping[str, object]) -> list[str]:
    """Return the names on a slower device than the executing one."""
    computes = [device for device in device_map.values() if device not in (CPU.name, DISK)]
    offloaded = (CPU.name, DISK) if computes else (DISK,)
    return [name for name, device in device_map.items() if device in offloaded]


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: Quantization,
    device_map: str | Mapping[str, object] | None = None,
    max_memory: Mapping[DeviceKey, Bytes | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
) -> dict[str, Any]:
    """Assign a device to every part of the model, by the part's quantised size.

    Raises:
        SettingError: the text is unknown, or 4-bit layers would be outside the accelerators.
    """
    config = bnb_quantization_config
    skipped = _skipped(model, config)
    if device_map is None:
        return {"": quantizing_device()}
    if isinstance(device_map, str):
        sizes: dict[str, Any] = {
            "no_split_module_classes": no_split_module_classes,
            "dtype": config.target_dtype,
            "special_dtypes": _dtypes_of_the_rest(model, config, skipped),
        }
        limits = limits_of_policy(model, device_map, max_memory, **sizes)
        devices: dict[str, Any] = dict(infer_auto_device_map(model, limits, **sizes))
    else:
        devices = dict(device_map)
    offloaded = [name for name in _offloaded_names(devices) if not _is_skipped(name, skipped)]
    if offloaded and isinstance(config, BnbQuantizationConfig) and config.load_in_4bit and isinstance(device_map, str):
        named = ", ".join(offloaded[:5]) or "any"
        raise SettingError(
            "4-bit layers can't be offloaded, and there isn't enough memory on the device for "
            f"{named}{', ...' if len(offloaded) > 5 else ''}. Raise max_memory, or give a device map and list them in "
            "skip_modules."
        )
    if offloaded:
        _log.info("Parts of the model are offloaded, quantised: %s", ", ".join(offloaded))
    return devices


def _dtypes_of_the_rest(model: nn.Module, config: Quantization, skipped: list[str]) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter that isn't quantised: all except the weights of linear layers."""
    kept, found = config.keep_in_fp32_modules or (), dict[str, torch.dtype]()
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        if not (own == "weight" and _is_linear(model.get_submodule(owner)) and not _is_skipped(owner, skipped)):
            found[name] = torch.float32 if _is_skipped(name, kept) else config.torch_dtype or parameter.dtype
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ in ("Linear8bitLt", "Linear4bit")


# ------------------------------------------------------------------------------------ bitsandbytes' layers


def _with_layers(model: nn.Module, config: Quantization, skipped: list[str]) -> nn.Module:
    if isinstance(config, TorchAoQuantizationConfig):
        return model  # the weights change, not the layers
    return replace_with_bnb_layers(model, config, modules_to_not_convert=skipped)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Iterable[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace the model's linear layers by bitsandbytes layers in place, except the named ones.

    Their weights are quantised when they move to a device.
    """
    prefix = ".".join(current_key_name or [])
    left_out = list(modules_to_not_convert or ())
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not _is_skipped(f"{prefix}.{name}" if prefix else name, left_out)
    ]
    for name, module in found:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, _bnb_layer(module, bnb_quantization_config))
    if not found:
        _log.warning("%s has no linear layer to quantise; left out are %s.", type(model).__name__, left_out)
    return model


def _bnb_layer(old: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    layers: Any = require("bitsandbytes", "quantization").nn
    shape = (old.in_features, old.out_features, old.bias is not None)
    device = old.weight.device
    if config.load_in_8bit:
        new = layers.Linear8bitLt(*shape, has_fp16_weights=False, threshold=config.llm_int8_threshold, device=device)
    else:
        new = layers.Linear4bit(
            *shape,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device=device,
        )
    new.weight.data = old.weight.data
    new.bias = old.bias
    new.requires_grad_(False)
    new.train(old.training)
    return new


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether the model has a bitsandbytes layer with 4-bit weights."""
    layer: Any = require("bitsandbytes", "quantization").nn.Linear4bit
    return any(isinstance(module, layer) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the module's first parameter."""
    return next(parameter.parameters()).device


def _torchao_quantizer(model: nn.Module, config: TorchAoQuantizationConfig, skipped: list[str]) -> Any:
    """Return a callback that takes a loaded weight's name and quantises its module unless it is skipped."""
    quantize = require("torchao.quantization", "fp8").quantize_

    def loaded(name: str) -> None:
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        if own == "weight" and isinstance(module, nn.Linear) and not _is_skipped(owner, skipped):
            quantize(module, config.config)

    return loaded


# ------------------------------------------------------------------------------------- models with values


def _quantize_loaded(model: nn.Module, config: Quantization, skipped: list[str]) -> nn.Module:
    warnings.warn(
        f"{type(model).__name__} has its values already, so it was in memory in full precision. Build it under "
        "`init_empty_weights()` and give `weights_location` to quantise each weight as it is read.",
        UserWarning,
        stacklevel=3,
    )
    device = as_device(quantizing_device())
    kept = config.keep_in_fp32_modules or ()
    model = _with_layers(model, config, skipped)
    if config.torch_dtype is not None:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and type(parameter) is nn.Parameter:
                parameter.data = parameter.data.to(torch.float32 if _is_skipped(name, kept) else config.torch_dtype)
    model = model.to(device)
    if isinstance(config, TorchAoQuantizationConfig):
        quantize = _torchao_quantizer(model, config, skipped)
        for name in [name for name, _ in model.named_parameters()]:
            quantize(name)
    return model
