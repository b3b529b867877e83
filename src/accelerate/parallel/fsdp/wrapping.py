"""Wrap units: the modules that FSDP shards together, and the ignored ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch

from ...errors import SettingError
from ...modules import move_in_place
from ...torch_private.fsdp import modules_of_policy
from ..rebind import canonical_name

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import CustomPolicy

#: A function as torch's FSDP takes it (``module, recurse, nonwrapped_numel``), or one of torch's policy objects.
WrapPolicy: TypeAlias = "Callable[..., bool] | CustomPolicy"


def find_wrap_units(
    model: torch.nn.Module, policy: WrapPolicy | None, ignored: Iterable[torch.nn.Module] = ()
) -> list[torch.nn.Module]:
    """Return the modules in ``model`` that ``policy`` wraps, children before parents, without ``model`` itself.

    A module with a parameter that is tied to one outside of it is left out: the unit around both shards it.

    Args:
        policy: None wraps nothing.
        ignored: modules to skip, with all modules inside them.
    """
    if policy is None:
        return []
    left_out = {part for module in ignored for part in module.modules()}
    chosen = modules_of_policy(policy, model, left_out)
    if chosen is not None:
        return _untied(model, [module for module in _children_first(model) if module in chosen and module is not model])
    assert callable(policy), "a policy object has chosen above"
    units: list[torch.nn.Module] = []
    _descend(model, policy, left_out, units, is_root=True)
    units = list(dict.fromkeys(units))  # a module that has two places is one unit
    if _is_by_class(policy):
        units += [part for part in _embedding(model) if part not in units and part not in left_out]
    return _untied(model, units)


def _children_first(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _descend(
    module: torch.nn.Module,
    policy: Callable[..., bool],
    left_out: set[torch.nn.Module],
    units: list[torch.nn.Module],
    is_root: bool = False,
) -> int:
    """Append the wrap units in ``module`` to ``units``, and return how many of its parameters they hold."""
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=num_parameters):
        return 0
    in_units = sum(_descend(child, policy, left_out, units) for child in module.children() if child not in left_out)
    rest = num_parameters - in_units
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=rest):
        return in_units
    units.append(module)
    return num_parameters


def _is_by_class(policy: WrapPolicy) -> bool:
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return getattr(policy, "func", None) is transformer_auto_wrap_policy


def _embedding(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the input embedding, if the model names it.

    The output head stays in the root unit, which is unsharded wherever the head is: programs read its weight without
    calling it (a loss in chunks), and gradients that pass a unit by aren't reduced.
    """
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except NotImplementedError:  # models without such a part say so
        return []
    return [found] if isinstance(found, torch.nn.Module) and found is not model else []


def _untied(model: torch.nn.Module, units: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the units without parameters that a module outside of them has too."""
    owners: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, []).append(part)
    tied = [set(parts) for parts in owners.values() if len(parts) > 1]
    return [unit for unit in units if not any(set() < places & {*unit.modules()} < places for places in tied)]


def find_ignored(modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that ``modules`` selects: a list of modules, or a regular expression for full module names.

    Raises:
        SettingError: the expression is invalid or matches no module.
    """
    if modules is None:
        return []
    if not isinstance(modules, str):
        return list(modules)
    try:
        pattern = re.compile(modules)
    except re.error as error:
        raise SettingError(f"ignored_modules={modules!r} is no regular expression: {error}.") from error
    found = [module for name, module in model.named_modules() if pattern.fullmatch(canonical_name(name))]
    if not found:
        raise SettingError(
            f"ignored_modules={modules!r} matches no module of {type(model).__name__}. The expression has to match a "
            "whole name as model.named_modules() gives it."
        )
    return found


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: torch.device
) -> set[torch.nn.Parameter]:
    """Move ``modules`` (or those whose names match) to ``device``, and return their parameters."""
    found = find_ignored(modules, model)
    for module in found:
        move_in_place(module, device)
    return {parameter for module in found for parameter in module.parameters()}
