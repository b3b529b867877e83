"""Tensors with several names: found, kept together, and tied again after loading."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)

TiedNames = Sequence[Sequence[str]]


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that are one and the same parameter, each sorted."""
    del kwargs  # older callers hand over what their own recursion needed
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def check_tied_parameters_in_config(model: Any) -> bool:
    """Whether the configuration of a transformers model says that it ties weights."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    read_text = getattr(config, "get_text_config", None)
    text_config = read_text() if callable(read_text) else config
    output = getattr(model, "get_output_embeddings", None)
    ties_embeddings = bool(getattr(text_config, "tie_word_embeddings", False)) and (
        callable(output) and output() is not None
    )
    ties_coders = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    ties_itself = isinstance(model, nn.Module) and any(
        callable(getattr(module, "_tie_weights", None)) for module in model.modules()
    )
    return ties_embeddings or ties_coders or ties_itself


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device that a map gives to a tensor or module: that of its longest prefix; None where it has none."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_tied_parameters_on_same_device(tied_params: TiedNames, device_map: Mapping[str, Any]) -> None:
    """A warning has been logged for each group of tied names that the map tears apart."""
    for group in tied_params:
        places = {name: device_of(name, device_map) for name in group}
        if len(set(places.values())) > 1:
            _log.warning(
                "These names are one parameter, and the device map puts them on different devices: %s. Each device "
                "will hold its own copy.",
                places,
            )


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds the tensor with a dotted name, and its name there."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def retie_parameters(model: nn.Module, tied_params: TiedNames) -> None:
    """Each group of names is one parameter: the first of them that has values."""
    for group in tied_params:
        owners = [owner_of(model, name) for name in group]
        found = [owner._parameters.get(own) for owner, own in owners]
        real = next((each for each in found if each is not None and not each.is_meta), None)
        if real is None:
            continue
        for owner, own in owners:
            owner._parameters[own] = real


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module | torch.Tensor]],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """The bytes of a module together with the waiting modules that hold its tied partners; their names; themselves.

    ``tied_params`` are the names of the partners. A tied weight is in ``module_sizes`` once, so nothing counts twice.
    """
    partners = partners_in(tied_params, modules_to_treat)
    names = [modules_to_treat[index][0] for index in partners]
    size = module_size + sum(module_sizes.get(name, 0) for name in names)
    return size, names, [modules_to_treat[index][1] for index in partners]


def partners_in(tied_params: Iterable[str], waiting: Sequence[tuple[str, Any]]) -> list[int]:
    """The positions of the waiting parts that are, or hold, one of the names, in order."""
    wanted = list(tied_params)
    return [
        index
        for index, (name, _part) in enumerate(waiting)
        if any(each == name or each.startswith(f"{name}.") for each in wanted)
    ]
