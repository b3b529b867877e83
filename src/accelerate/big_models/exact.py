"""An exact search for the device map with the most bytes on the fastest devices, then in host memory. Internal.

It may place pieces out of order to fill a device better, and reserves memory only for layers that will be fetched.
Pieces of equal size are interchangeable, so for a model of a hundred equal layers it searches only a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ..devices.memory import convert_bytes
from ..devices.table import CPU
from .budget import DeviceKey, Part, Placement, PlacementProblem
from .sizes import DISK

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
        inside = [index for index, atom in enumerate(atoms) if any(atom.holds(name) for name in group)]
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
