"""Traverse modules, replace their tensors, get attributes by dotted name, merge nested dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, Literal, overload

import torch

from .torch_private.modules import takes_data_of


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return the attribute with the dotted name ``attr``: ``recursive_getattr(model, "encoder.layer.0")``."""
    return reduce(getattr, attr.split("."), obj)


def is_sharded(tensor: object) -> bool:
    """Return True if ``tensor`` is a DTensor; it compares the class's name, because importing the class is slow."""
    return type(tensor).__name__ == "DTensor" or (
        isinstance(tensor, torch.nn.Parameter) and type(tensor.data).__name__ == "DTensor"
    )


@overload
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: Literal[False] = False
) -> list[torch.nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, torch.nn.Module]]: ...
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: bool = False
) -> list[torch.nn.Module] | list[tuple[str, torch.nn.Module]]:
    """Return the modules of the model, children before their parent and the model itself last.

    With ``return_fqns``, each comes with its dotted name (the model's is empty).
    """
    named = list(_children_first(model, ""))
    return named if return_fqns else [module for _name, module in named]


def _children_first(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


#: A module, and the name under which it has a parameter.
Place = tuple[torch.nn.Module, str]


def parameter_places(model: torch.nn.Module) -> dict[int, list[Place]]:
    """Return all places of each parameter in ``model``, by the parameter's id; a tied one has several."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def put_parameter(places: Iterable[Place], parameter: torch.Tensor) -> None:
    """Put ``parameter`` (or a replacement tensor) into all ``places``."""
    for module, name in places:
        module._parameters[name] = parameter  # pyright: ignore[reportArgumentType]


def replace_tensors(
    model: torch.nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool = False
) -> None:
    """Replace every parameter of ``model`` by ``replacement(parameter)``, with ``buffers`` also buffers; keep ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = replacement(tensor)
                    tensors[name] = made[id(tensor)]


def move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Move ``tensor`` to ``device`` in place, so that optimizers and tied modules keep the same object."""
    if tensor.device == device:
        return
    if takes_data_of(tensor, device):
        tensor.data = tensor.data.to(device)
        return
    moved: torch.Tensor = tensor.data.to(device)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


def move_in_place(module: torch.nn.Module, device: torch.device) -> None:
    """Move the tensors of ``module`` to ``device``; other modules that share them see them there."""
    for tensor in [*module.parameters(), *module.buffers()]:
        move_tensor(tensor, device)
    module.to(device)


def moved(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return ``model.to(device)`` with tied weights still tied, which moves to extension devices would untie."""
    tied = [places for places in parameter_places(model).values() if len(places) > 1]
    model = model.to(device)
    for places in tied:
        found = [getattr(module, name) for module, name in places]
        if any(one is not found[0] for one in found):
            put_parameter(places, found[0])
    return model


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a parameter of the model is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge ``source`` into ``destination``, including nested dicts, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def get_pretty_name(obj: object) -> str:
    """Return a name for an object: its own qualified name, else its class's, else its text."""
    if getattr(obj, "__qualname__", None) is None and getattr(obj, "__name__", None) is None:
        obj = getattr(obj, "__class__", obj)
    for attribute in ("__qualname__", "__name__"):
        name = getattr(obj, attribute, None)
        if name is not None:
            return str(name)
    return str(obj)


def get_model_tp_size(model: object) -> int | None:
    """Return the tensor-parallel size with which ``model`` was loaded; None if unknown.

    transformers stores it in the model's ``tp_size``, from version 5 on in its ``config.distributed_config``.
    """
    size = getattr(model, "tp_size", None)
    if not isinstance(size, int):
        asked = getattr(getattr(model, "config", None), "distributed_config", None)
        size = asked.get("tp_size") if isinstance(asked, Mapping) else getattr(asked, "tp_size", None)
    return size if isinstance(size, int) else None
