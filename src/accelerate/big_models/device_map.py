"""Device maps of a model: inferred by one of two planners, simplified and checked. Internal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar, final

import torch
from torch import nn

from ..devices.memory import convert_bytes
from ..devices.table import CPU
from ..errors import SettingError
from .budget import Bytes, DeviceKey, DevicePlan, Part, Placement, PlacementProblem, get_max_memory, parts_of
from .sizes import (
    DISK,
    ByteDtype,
    TiedNames,
    compute_module_sizes,
    find_tied_parameters,
    is_inside,
    no_split_classes,
    own_parts,
    partners_in,
    with_parents,
)

logger: logging.Logger = logging.getLogger(__name__)

Map = TypeVar("Map", bound=MutableMapping[str, Any])


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceKey, Bytes | str] | None = None,
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
    """Assign a device to every part of the model, within the limits of ``max_memory``.

    ``"greedy"`` follows the order of the model and never returns to an earlier device. ``"exact"`` searches for the map
    with the fewest bytes outside the accelerators; it never has more of them than the greedy map.

    Raises:
        SettingError: the limits are too small, or a key of ``max_memory`` isn't a device.
    """
    problem = _problem(model, get_max_memory(max_memory), no_split_module_classes, dtype, special_dtypes)
    if method not in ("greedy", "exact"):
        raise SettingError(f"infer_auto_device_map(method={method!r}): choose 'greedy' or 'exact'.")
    plan = _exact_or_greedy(problem, fallback_allocation) if method == "exact" else None
    if plan is None:
        plan = DevicePlan.of(problem, place_greedily(problem, fallback_allocation), "greedy")
    if not offload_buffers:
        _warn_about_buffers(problem, plan)
    if verbose:
        print(plan)
    return clean_device_map(plan) if clean_result else plan


def _problem(
    model: nn.Module,
    limits: Mapping[DeviceKey, object],
    no_split_module_classes: str | Iterable[str] | None,
    dtype: ByteDtype | None,
    special_dtypes: Mapping[str, ByteDtype] | None,
) -> PlacementProblem:
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    buffer_sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    parts = parts_of(own_parts(model), sizes, buffer_sizes, no_split_classes(no_split_module_classes))
    devices = tuple(limits) if DISK in limits else (*limits, DISK)
    return PlacementProblem(tuple(parts), devices, limits, tuple(map(frozenset, find_tied_parameters(model))))


def _exact_or_greedy(problem: PlacementProblem, fallback_allocation: bool) -> DevicePlan | None:
    """Return the exact plan; the greedy one if it costs no more, because that keeps the model's order."""
    placements = place_exactly(problem)
    if placements is None:
        return None
    exact = DevicePlan.of(problem, placements, "exact")
    try:
        greedy = DevicePlan.of(problem, place_greedily(problem, fallback_allocation), "exact, which is the greedy one")
    except SettingError:  # it fits only out of order
        return exact

    def cost(plan: DevicePlan) -> tuple[int, int]:
        return -plan.num_bytes_on(problem.fastest), plan.num_bytes_on([DISK])

    return exact if cost(exact) < cost(greedy) else greedy


def _warn_about_buffers(problem: PlacementProblem, plan: DevicePlan) -> None:
    """Warn if the buffers of offloaded parts don't fit on the device that runs the layers.

    The device holds them beside its own parts and the weights of the largest offloaded layer.
    """
    accelerators = problem.accelerators
    slow = (CPU.name, DISK) if accelerators else (DISK,)
    offloaded = [each.part for each in plan.placements if each.device in slow]
    needed = sum(part.buffer_bytes for part in offloaded)
    if not needed or not accelerators:
        return
    layers = (layer for part in offloaded for layer in part.unsplit_parts() if not layer.is_tensor)
    fetched = max((layer.num_bytes - layer.buffer_bytes for layer in layers), default=0)
    left = max(
        problem.limit(device) - plan.num_bytes_on([device]) - fetched * (device in problem.reserve_devices)
        for device in accelerators
    )
    if needed > left:
        warnings.warn(
            f"Current model requires {needed} bytes of buffer for offloaded layers, which seems does not fit any GPU's "
            f"remaining memory: the most left on a device, beside its own layers and the largest offloaded one, is "
            f"{convert_bytes(max(left, 0))}. If memory runs out, use offload_buffers=True.",
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
    """Return the first module, breadth first, that fits into ``size_limit``: its name, itself, the other modules."""
    parts = parts_of(modules, module_sizes, {}, no_split_classes(no_split_module_classes))
    problem = PlacementProblem(tuple(parts), (), {}, tuple(map(frozenset, tied_parameters or ())))
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
    """Merge, in place, the entries below a module into one if they all name the same device; return the map."""
    below = {name: device for name, device in device_map.items() if is_inside(name, module_name)}
    merged = _merged(below, len(with_parents(module_name)) - 1, module_name)
    if len(merged) < len(below):
        items = list(device_map.items())
        device_map.clear()
        for name, device in items:
            if name not in below:
                device_map[name] = device
            elif merged:  # the merged entry replaces the first one
                device_map.update(merged)
                merged = {}
    return device_map


def _merged(entries: Mapping[str, object], depth: int, name: str) -> dict[str, object]:
    """Return ``entries`` as one entry for ``name`` if they agree, else merged by their next name part."""
    if len(entries) > 1 and len(set(entries.values())) == 1:
        return {name: next(iter(entries.values()))}
    if len(entries) <= 1:
        return dict(entries)
    groups: dict[str, dict[str, object]] = {}
    for each, device in entries.items():
        groups.setdefault(".".join(each.split(".")[: depth + 1]), {})[each] = device
    result: dict[str, object] = {}
    for group, members in groups.items():
        result.update(members if group == name else _merged(members, depth + 1, group))
    return result


def check_device_map(model: nn.Module, device_map: Mapping[str, object]) -> None:
    """Raise unless the map gives every tensor of the model a device; warn about unknown names.

    Raises:
        SettingError: the map leaves out tensors; the message names them.
    """
    tensors = list(model.state_dict().keys())
    known = {"", *chain.from_iterable(map(with_parents, tensors))}
    known.update(name for name, _ in model.named_modules())
    known.update(name for name, _ in model.named_buffers())
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The device map names parts that {type(model).__name__} hasn't: {', '.join(unknown)}.",
            UserWarning,
            stacklevel=2,
        )
    uncovered = [name for name in tensors if not any(each in device_map for each in with_parents(name))]
    if uncovered:
        shown = ", ".join(uncovered[:10]) + (", ..." if len(uncovered) > 10 else "")
        raise SettingError(
            f"The device map gives no device to {len(uncovered)} tensors of {type(model).__name__}: {shown}. Name "
            "them, or a module that holds them."
        )


# --------------------------------------------------------------------------------------------------
# The greedy planner: it follows the order of the model, by the documented rules


def place_greedily(problem: PlacementProblem, fallback_allocation: bool = False) -> list[Placement]:
    """Assign a device to every part in the order of the model, without returning to an earlier device.

    Raises:
        SettingError: the limits of all devices together are too small.
    """
    return _Greedy(problem, fallback_allocation).run()


def first_that_fits(pending: Sequence[Part], free: float, problem: PlacementProblem) -> tuple[Part | None, list[Part]]:
    """Return the first part, breadth first, that fits into ``free`` bytes and has no tie outside; and the others."""
    level = [(part, [*pending[:index]], [*pending[index + 1 :]]) for index, part in enumerate(pending)]
    while level:
        below: list[tuple[Part, list[Part], list[Part]]] = []
        for part, before, after in level:
            if part.num_bytes <= free and not problem.tied_names_outside(part):
                return part, [*before, *after]
            below += [
                (each, [*before, *part.parts[:index]], [*part.parts[index + 1 :], *after])
                for index, each in enumerate(part.parts)
            ]
        level = below
    return None, list(pending)


@final
class _Greedy:
    def __init__(self, problem: PlacementProblem, fallback_allocation: bool) -> None:
        self.problem = problem
        self.pending = list(problem.parts)
        self.devices = list(problem.devices)
        self.used: dict[DeviceKey, int] = dict.fromkeys(self.devices, 0)
        self.fallback_allocation = fallback_allocation
        self.placements: list[Placement] = []
        self.next_reason = ""

    def run(self) -> list[Placement]:
        while self.pending:
            part = self.pending.pop(0)
            free = self._free_bytes()
            partners = self._partners(part)
            together = part.num_bytes + sum(each.num_bytes for each in partners)
            if together <= free:
                self._assign(part, partners)
            elif part.num_bytes <= free:
                self._split_a_partner(part, partners)
            elif part.parts:
                self.pending[:0] = part.parts
            else:
                self._skip_or_advance(part, free)
        return self.placements

    def _free_bytes(self) -> float:
        device = self.devices[0]
        return self.problem.limit(device) - self.used[device] - self._reserve()

    def _partners(self, part: Part) -> list[Part]:
        """Return the pending parts that are tied to this one, directly or through other parts."""
        found: list[int] = []
        names = self.problem.tied_names_outside(part)
        pending = [(each.name, each) for each in self.pending]
        while names:
            new = [index for index in partners_in(names, pending) if index not in found]
            found += new
            names = [name for index in new for name in self.problem.tied_names_outside(self.pending[index])]
        return [self.pending[index] for index in sorted(found)]

    def _assign(self, part: Part, partners: Sequence[Part]) -> None:
        device = self.devices[0]
        reason = self.next_reason or "fits"
        for each in (part, *partners):
            self.placements.append(Placement(each, device, reason))
            self.used[device] += each.num_bytes
            reason = f"tied to {part.name}"
        self.pending = [each for each in self.pending if not any(each is other for other in partners)]

    def _split_a_partner(self, part: Part, partners: Sequence[Part]) -> None:
        """Split the first tied part that can be split and retry this part; if none can, go to the next device."""
        self.pending.insert(0, part)
        for partner in partners:
            if partner.parts:
                index = next(i for i, each in enumerate(self.pending) if each is partner)
                self.pending[index : index + 1] = partner.parts
                return
        self._advance(part, f"with what it is tied to it doesn't fit on {self.devices[0]}")

    def _skip_or_advance(self, part: Part, free: float) -> None:
        self.pending.insert(0, part)
        device = self.devices[0]
        if self.fallback_allocation and not self.used[device]:
            found, rest = first_that_fits(self.pending, free, self.problem)
            if found is not None:
                self.pending = rest
                self.next_reason = f"the first that fits on {device}"
                self._assign(found, ())
                self.next_reason = ""
                return
        self._advance(part, f"{device} has {convert_bytes(max(free, 0))} left")

    def _advance(self, part: Part, reason: str) -> None:
        device = self.devices[0]
        if not self.used[device]:
            needed = part.num_bytes + self._reserve(without=part)
            logger.warning(
                "No modules could be assigned to device %s due to insufficient memory: its limit is %s, and the first "
                "remaining part, %s, needs %s there with the memory that is reserved for later layers.\n"
                "  - %s: %s required",
                device,
                convert_bytes(self.problem.limit(device)),
                part.name,
                convert_bytes(needed),
                device,
                f"{needed} bytes",
            )
        if len(self.devices) == 1:
            raise SettingError(
                f"The limits in max_memory are too small for the model: {part.name} "
                f"({convert_bytes(part.num_bytes)}) has no device, because {reason}. Raise a "
                "limit, or leave 'disk' without one."
            )
        self.devices.pop(0)
        self.next_reason = reason

    def _reserve(self, without: Part | None = None) -> int:
        """Return the bytes to reserve for the largest layer that may later be copied through this device."""
        if self.devices[0] not in self.problem.reserve_devices:
            return 0
        layers = (each for each in self.pending if each is not without and not each.is_tensor)
        return max((each.largest_layer for each in layers), default=0)


# --------------------------------------------------------------------------------------------------
# The exact planner: the map with the most bytes on the fastest devices, then in host memory
#
# It may place pieces out of order to fill a device better, and reserves memory only for layers that will be fetched.
# Pieces of equal size are interchangeable, so for a model of a hundred equal layers it searches only a few numbers.

#: The maximum number of search states for one model; then the best map so far is used.
MAX_STATES = 30_000


@final
@dataclass(frozen=True, eq=False)
class _Piece:
    """Parts placed on one device: a single unsplit part, or several with a shared tensor."""

    position: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fetch_bytes(self) -> int:
        """The free bytes that the executing device needs to fetch this piece from a slower one."""
        return max(part.num_bytes for part in self.parts)


@final
class _StateBudget:
    """The number of search states that remain to be visited."""

    def __init__(self, num_states: int) -> None:
        self.left = num_states


def place_exactly(problem: PlacementProblem) -> list[Placement] | None:
    """Search the placement with the fewest bytes outside the fastest devices; return None if none was found."""
    pieces = _pieces(problem)
    budget = _StateBudget(MAX_STATES)
    best: dict[_Piece, DeviceKey] | None = None
    for assigned in _improving_fillings(problem, pieces, problem.fastest, budget):
        rest = [piece for piece in pieces if piece not in assigned]
        whole = _place_rest(problem, assigned, rest, budget)
        if whole is not None and (best is None or _cost(problem, whole) < _cost(problem, best)):
            best = whole
    if best is None:
        return None
    rows = [(part, device, _reason(problem, piece, device)) for piece, device in best.items() for part in piece.parts]
    order = {part: index for index, part in enumerate(atom for each in problem.parts for atom in each.unsplit_parts())}
    return [Placement(*row) for row in sorted(rows, key=lambda row: order[row[0]])]


def _reason(problem: PlacementProblem, piece: _Piece, device: DeviceKey) -> str:
    if len(piece.parts) > 1:
        return f"together with {', '.join(part.name for part in piece.parts[:3])}, which share a tensor"
    if device in problem.fastest:
        return "the best filling of the fastest devices"
    return f"the fastest devices are full; {convert_bytes(piece.fetch_bytes)} are kept free there to fetch it"


def _cost(problem: PlacementProblem, devices: dict[_Piece, DeviceKey]) -> tuple[int, int]:
    slow = sum(piece.num_bytes for piece, device in devices.items() if device not in problem.fastest)
    disk = sum(piece.num_bytes for piece, device in devices.items() if device == DISK)
    return slow, disk


def _pieces(problem: PlacementProblem) -> list[_Piece]:
    atoms = [atom for part in problem.parts for atom in part.unsplit_parts()]
    leader = list(range(len(atoms)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    for group in problem.ties:
        inside = [index for index, atom in enumerate(atoms) if any(is_inside(name, atom.name) for name in group)]
        for index in inside[1:]:
            first, second = sorted((find(inside[0]), find(index)))
            leader[second] = first
    together: dict[int, list[Part]] = {}
    for index, atom in enumerate(atoms):
        together.setdefault(find(index), []).append(atom)
    return [_Piece(position, tuple(parts)) for position, parts in together.items()]


def _improving_fillings(
    problem: PlacementProblem, pieces: Sequence[_Piece], devices: Sequence[DeviceKey], budget: _StateBudget
) -> Iterator[dict[_Piece, DeviceKey]]:
    """Yield ever better fillings of the devices, for each number of bytes to reserve for fetching."""
    total = sum(piece.num_bytes for piece in pieces)
    most = -1
    for reserved in sorted({0, *(piece.fetch_bytes for piece in pieces)}):
        limits = [problem.limit(device) - reserved * (device in problem.reserve_devices) for device in devices]
        if min(total, sum(limits)) <= most or min(limits, default=-1) < 0:
            continue
        filled = _fill(pieces, devices, limits, reserved, budget)
        num_bytes = -1 if filled is None else sum(piece.num_bytes for piece in filled)
        if filled is not None and num_bytes >= most:
            most = num_bytes
            yield filled


def _place_rest(
    problem: PlacementProblem, assigned: dict[_Piece, DeviceKey], rest: Sequence[_Piece], budget: _StateBudget
) -> dict[_Piece, DeviceKey] | None:
    """Place the rest in host memory while it fits, else on disk; return None if the disk's limit is too low."""
    hosted: dict[_Piece, DeviceKey] = {}
    if rest and CPU.name in problem.devices and CPU.name not in problem.fastest:
        for better in _improving_fillings(problem, rest, [CPU.name], budget):
            hosted = better
    last = [piece for piece in rest if piece not in hosted]
    if sum(piece.num_bytes for piece in last) > problem.limit(DISK):
        return None
    return assigned | hosted | dict.fromkeys(last, DISK)


def _fill(
    pieces: Sequence[_Piece], devices: Sequence[DeviceKey], limits: Sequence[float], reserved: int, budget: _StateBudget
) -> dict[_Piece, DeviceKey] | None:
    """Return the filling with the most bytes within the limits, including all pieces that need more than ``reserved``.

    None if these pieces alone don't fit.
    """
    classes: dict[tuple[int, bool], list[_Piece]] = {}
    for piece in pieces:
        classes.setdefault((piece.num_bytes, piece.fetch_bytes > reserved), []).append(piece)
    # Required pieces first, large pieces before small ones: good fillings are then found early.
    keys = sorted(classes, key=lambda key: (not key[1], -key[0]))
    search = _Search([size for size, _required in keys], [required for _size, required in keys], limits, budget)
    counts = search.run([len(classes[key]) for key in keys])
    if counts is None:
        return None
    assigned: dict[_Piece, DeviceKey] = {}
    for key, column in zip(keys, zip(*counts, strict=True), strict=True):
        waiting = iter(classes[key])
        for device, count in zip(devices, column, strict=True):
            assigned.update({next(waiting): device for _ in range(count)})
    return assigned


@final
class _Search:
    """A branch-and-bound search for the number of pieces of each size on each device."""

    def __init__(self, sizes: list[int], required: list[bool], limits: Sequence[float], budget: _StateBudget) -> None:
        self.sizes, self.required, self.limits = sizes, required, list(limits)
        self.budget = budget
        self.best: list[tuple[int, ...]] | None = None
        self.best_bytes = -1

    def run(self, available: list[int]) -> list[tuple[int, ...]] | None:
        total = sum(size * count for size, count in zip(self.sizes, available, strict=True))
        self.most_possible = min(total, sum(self.limits))
        self._place(0, available, [], 0)
        return self.best

    def _is_over(self) -> bool:
        return self.budget.left <= 0 or self.best_bytes >= self.most_possible

    def _place(self, index: int, left: list[int], chosen: list[tuple[int, ...]], assigned: int) -> None:
        """Try every filling of the device at ``index`` and of those after it."""
        if index == len(self.limits):
            complete = not any(count for count, required in zip(left, self.required, strict=True) if required)
            if complete and assigned > self.best_bytes:
                self.best, self.best_bytes = list(chosen), assigned
            return
        rest = sum(size * count for size, count in zip(self.sizes, left, strict=True))
        if assigned + min(rest, sum(self.limits[index:])) <= self.best_bytes:
            return
        for counts, num_bytes in self._fillings(self.limits[index], left, 0):
            after = [have - taken for have, taken in zip(left, counts, strict=True)]
            self._place(index + 1, after, [*chosen, counts], assigned + num_bytes)
            if self._is_over():
                return

    def _fillings(self, limit: float, left: list[int], first: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the numbers of pieces, for sizes from ``first`` on, that fit into ``limit``; fuller ones early."""
        self.budget.left -= 1
        if first == len(left):
            yield (), 0
            return
        size = self.sizes[first]
        most = left[first] if size == 0 else min(left[first], int(limit // size))
        for count in range(most, -1, -1):
            for others, num_bytes in self._fillings(limit - count * size, left, first + 1):
                yield (count, *others), num_bytes + count * size
                if self._is_over():
                    return
