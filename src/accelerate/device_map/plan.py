"""The device map of a model: planned, tidied and checked."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..devices import CPU
from ..errors import SettingError
from ..memory import convert_bytes
from .budget import Bytes, Place, get_max_memory
from .exact import place_exactly
from .greedy import first_that_fits, place_greedily
from .parts import DevicePlan, Problem, parts_of
from .sizes import ByteDtype, compute_module_sizes, no_split_classes, own_parts
from .tensors import DISK
from .tied import TiedNames, find_tied_parameters

logger = logging.getLogger(__name__)

Map = TypeVar("Map", bound=MutableMapping[str, Any])


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Place, Bytes | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: ByteDtype | None = None,
    special_dtypes: Mapping[str, ByteDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    method: Literal["greedy", "exact"] = "greedy",
) -> DevicePlan:
    """A device for every part of the model, within the limits; printed, it says which, how large and why.

    ``"greedy"`` goes through the model in order and never back to a device it left. ``"exact"`` searches the map with
    the fewest bytes off the accelerators, and is never worse in that than the greedy one.

    Raises:
        SettingError: the limits are too small, or a key of ``max_memory`` is no device.
    """
    problem = _problem(model, get_max_memory(max_memory), no_split_module_classes, dtype, special_dtypes)
    if method not in ("greedy", "exact"):
        raise SettingError(f"infer_auto_device_map(method={method!r}): choose 'greedy' or 'exact'.")
    plan = _better(problem, fallback_allocation) if method == "exact" else None
    if plan is None:
        plan = DevicePlan.of(problem, place_greedily(problem, fallback_allocation), "greedy")
    if not offload_buffers:
        _warn_of_buffers(problem, plan)
    if verbose:
        print(plan)
    return clean_device_map(plan) if clean_result else plan


def _problem(
    model: nn.Module,
    limits: Mapping[Place, Any],
    no_split_module_classes: str | Iterable[str] | None,
    dtype: ByteDtype | None,
    special_dtypes: Mapping[str, ByteDtype] | None,
) -> Problem:
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    buffer_sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    parts = parts_of(own_parts(model), sizes, buffer_sizes, no_split_classes(no_split_module_classes))
    places = tuple(limits) if DISK in limits else (*limits, DISK)
    return Problem(tuple(parts), places, limits, tuple(map(frozenset, find_tied_parameters(model))))


def _better(problem: Problem, fallback_allocation: bool) -> DevicePlan | None:
    """The exact plan, or the greedy one where it is as good: that one keeps the order of the model."""
    decisions = place_exactly(problem)
    if decisions is None:
        return None
    exact = DevicePlan.of(problem, decisions, "exact")
    try:
        greedy = DevicePlan.of(problem, place_greedily(problem, fallback_allocation), "exact, which is the greedy one")
    except SettingError:  # out of order it fits
        return exact

    def cost(plan: DevicePlan) -> tuple[int, int]:
        return -plan.num_bytes_on(problem.fastest), plan.num_bytes_on([DISK])

    return exact if cost(exact) < cost(greedy) else greedy


def _warn_of_buffers(problem: Problem, plan: DevicePlan) -> None:
    """Buffers of offloaded parts stay where the layers run, so they need room there."""
    accelerators = problem.accelerators
    slow = (CPU.name, DISK) if accelerators else (DISK,)
    needed = sum(each.part.buffer_bytes for each in plan.decisions if each.place in slow)
    if not needed or not accelerators:
        return
    left = max(problem.limit(place) - plan.num_bytes_on([place]) for place in accelerators)
    if needed > left:
        warnings.warn(
            f"Current model requires {needed} bytes of buffer for offloaded layers, which seems does not fit any GPU's "
            f"remaining memory: the largest room left is {convert_bytes(max(left, 0))}. If memory runs out, use "
            "offload_buffers=True.",
            UserWarning,
            stacklevel=3,
        )


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    size_limit: Bytes,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: TiedNames | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[tuple[str, nn.Module | torch.Tensor]]]:
    """The first module, breadth first, that fits into ``size_limit``: its name, itself, and the modules left."""
    parts = parts_of(modules, module_sizes, {}, no_split_classes(no_split_module_classes))
    problem = Problem(tuple(parts), (), {}, tuple(map(frozenset, tied_parameters or ())))
    found, rest = first_that_fits(parts, size_limit, problem)
    if found is None:
        return None, None, list(modules)
    named = {f"{name}.{own}" if own else name: each for name, module in modules for own, each in _all_parts(module)}
    return found.name, named[found.name], [(part.name, named[part.name]) for part in rest]


def _all_parts(module: nn.Module | torch.Tensor) -> Iterable[tuple[str, nn.Module | torch.Tensor]]:
    if isinstance(module, torch.Tensor):
        return [("", module)]
    return [*module.named_modules(), *module.named_parameters(), *module.named_buffers()]


def clean_device_map(device_map: Map, module_name: str = "") -> Map:
    """The same map, changed in place, with one entry wherever all entries below a module name one device."""
    prefix = f"{module_name}." if module_name else ""
    below = {name: place for name, place in device_map.items() if name.startswith(prefix) or name == module_name}
    merged = _merged(below, len(prefix.split(".")) - 1 if prefix else 0, module_name)
    if len(merged) < len(below):
        items = list(device_map.items())
        device_map.clear()
        for name, place in items:
            if name not in below:
                device_map[name] = place
            elif merged:  # all of them stand where the first one stood
                device_map.update(merged)
                merged = {}
    return device_map


def _merged(entries: Mapping[str, Any], depth: int, name: str) -> dict[str, Any]:
    """``entries`` with one for ``name`` where they agree, else merged by their next name part."""
    if len(entries) > 1 and len(set(entries.values())) == 1:
        return {name: next(iter(entries.values()))}
    if len(entries) <= 1:
        return dict(entries)
    groups: dict[str, dict[str, Any]] = {}
    for each, place in entries.items():
        groups.setdefault(".".join(each.split(".")[: depth + 1]), {})[each] = place
    result: dict[str, Any] = {}
    for group, members in groups.items():
        result.update(members if group == name else _merged(members, depth + 1, group))
    return result


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Every tensor of the model has a device; names that are no part of the model have been warned of.

    Raises:
        SettingError: tensors that the map leaves out, by name.
    """
    tensors = list(model.state_dict().keys())
    known = {"", *tensors}
    for name in tensors:
        while name:
            name = name.rpartition(".")[0]
            known.add(name)
    known.update(name for name, _ in model.named_modules())
    known.update(name for name, _ in model.named_buffers())
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The device map names parts that {type(model).__name__} hasn't: {', '.join(unknown)}.",
            UserWarning,
            stacklevel=2,
        )
    uncovered = [name for name in tensors if not _is_covered(name, device_map)]
    if uncovered:
        shown = ", ".join(uncovered[:10]) + (", ..." if len(uncovered) > 10 else "")
        raise SettingError(
            f"The device map gives no device to {len(uncovered)} tensors of {type(model).__name__}: {shown}. Name "
            "them, or a module that holds them."
        )


def _is_covered(name: str, device_map: Mapping[str, Any]) -> bool:
    while name:
        if name in device_map:
            return True
        name = name.rpartition(".")[0]
    return "" in device_map
