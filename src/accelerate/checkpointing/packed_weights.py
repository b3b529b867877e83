"""4-bit weights of bitsandbytes: load their statistics, which its layers write to state dicts but don't read.

A state dict has the packed values of a layer as ``weight``, and the data to dequantize them (scales, a table, a
description) as ``weight.absmax``, ``weight.quant_map``, ``weight.quant_state.bitsandbytes__nf4``, ....
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

_STATISTIC: Final = re.compile(
    r"(?P<layer>.*)\.weight\.(?P<key>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)


def packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the names and layers of ``model`` with 4-bit weights."""
    for name, module in model.named_modules():
        state = module.__dict__.get("quant_state") or getattr(module._parameters.get("weight"), "quant_state", None)
        if state is not None and callable(getattr(state, "as_dict", None)):
            yield name, module


def is_statistic(name: str) -> bool:
    """Return whether ``name`` in a state dict names a statistic of packed weights."""
    return _STATISTIC.fullmatch(name) is not None


def load_statistics(model: object, state: Mapping[str, Any], canonical: Callable[[str], str] = str) -> dict[str, Any]:
    """Set the statistics in ``state`` on the layers of ``model``, and return the other entries.

    The result includes statistics of layers that aren't in 4 bits here.
    """
    if not isinstance(model, torch.nn.Module):
        return dict(state)
    layers = {canonical(name): layer for name, layer in packed_layers(model)}
    found: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in state.items():
        match = _STATISTIC.fullmatch(name) if layers else None
        if match is None or match["layer"] not in layers:
            owner, _, own = name.rpartition(".")
            rest[name] = _stored_as(layers[owner], value) if own == "weight" and owner in layers else value
        else:
            found.setdefault(match["layer"], {})[match["key"]] = value
    for name, statistics in found.items():
        layer = layers[name]
        if any(key.startswith("quant_state.") for key in statistics):  # complete, not those of another version
            set_statistics(layer, statistics)
    return rest


def _stored_as(layer: Any, value: Any) -> Any:
    """Return the packed values ``value`` in the dtype and shape of those of ``layer``."""
    kind: torch.dtype = layer.weight.dtype
    if type(value) is not torch.Tensor or value.dtype == kind or value.nbytes % kind.itemsize:
        return value
    return value.reshape(-1).view(torch.uint8).view(kind).reshape(-1, 1)


def set_statistics(layer: Any, statistics: Mapping[str, torch.Tensor]) -> None:
    """Set the statistics of ``layer`` to copies of those in ``statistics``."""
    known = layer.quant_state or layer.weight.quant_state
    copies = {key: value.clone() for key, value in statistics.items()}
    layer.quant_state = layer.weight.quant_state = type(known).from_dict(copies, device=known.absmax.device)
