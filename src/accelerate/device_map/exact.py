"""A small exact search: as many bytes as possible where the layers run, and then in host memory.

It takes pieces out of order where that fills a device better, and keeps room only for the layers that really have to
be fetched. Pieces of equal size are interchangeable, so a model of a hundred equal layers is a handful of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ..devices import CPU
from ..memory import convert_bytes
from .budget import Place
from .parts import Decision, Part, Problem
from .tensors import DISK

#: States looked at for one model before the best map found so far is taken.
MAX_STATES = 30_000


@final
@dataclass(frozen=True, eq=False)
class _Piece:
    """Parts that lie together: one that is never split, or several that share a tensor."""

    position: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def room(self) -> int:
        """What has to be free where it runs, when it lies elsewhere."""
        return max(part.num_bytes for part in self.parts)


@final
class _Budget:
    """How much of the search is left."""

    def __init__(self, num_states: int) -> None:
        self.left = num_states


def place_exactly(problem: Problem) -> list[Decision] | None:
    """A place for every piece so that the fewest bytes lie off the fastest places; None where no map was found."""
    pieces = _pieces(problem)
    budget = _Budget(MAX_STATES)
    best: dict[_Piece, Place] | None = None
    for placed in _fillings_of(problem, pieces, problem.fastest, budget):
        rest = [piece for piece in pieces if piece not in placed]
        whole = _with_slower(problem, placed, rest, budget)
        if whole is not None and (best is None or _cost(problem, whole) < _cost(problem, best)):
            best = whole
    if best is None:
        return None
    rows = [(part, place, _why(problem, piece, place)) for piece, place in best.items() for part in piece.parts]
    order = {part: index for index, part in enumerate(atom for each in problem.parts for atom in each.atoms())}
    return [Decision(*row) for row in sorted(rows, key=lambda row: order[row[0]])]


def _why(problem: Problem, piece: _Piece, place: Place) -> str:
    if len(piece.parts) > 1:
        return f"together with {', '.join(part.name for part in piece.parts[:3])}, which share a tensor"
    if place in problem.fastest:
        return "the best filling of the fastest places"
    return f"the fastest places are full; {convert_bytes(piece.room)} are kept free there to fetch it"


def _cost(problem: Problem, places: dict[_Piece, Place]) -> tuple[int, int]:
    slow = sum(piece.num_bytes for piece, place in places.items() if place not in problem.fastest)
    disk = sum(piece.num_bytes for piece, place in places.items() if place == DISK)
    return slow, disk


def _pieces(problem: Problem) -> list[_Piece]:
    atoms = [atom for part in problem.parts for atom in part.atoms()]
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


def _fillings_of(
    problem: Problem, pieces: Sequence[_Piece], places: Sequence[Place], budget: _Budget
) -> Iterator[dict[_Piece, Place]]:
    """Better and better fillings of the places, for each amount of room that may be kept there for fetching."""
    total = sum(piece.num_bytes for piece in pieces)
    most = -1
    for kept in sorted({0, *(piece.room for piece in pieces)}):
        limits = [problem.limit(place) - kept * (place in problem.through) for place in places]
        if min(total, sum(limits)) <= most or min(limits, default=-1) < 0:
            continue
        filled = _fill(pieces, places, limits, kept, budget)
        num_bytes = -1 if filled is None else sum(piece.num_bytes for piece in filled)
        if filled is not None and num_bytes >= most:
            most = num_bytes
            yield filled


def _with_slower(
    problem: Problem, placed: dict[_Piece, Place], rest: Sequence[_Piece], budget: _Budget
) -> dict[_Piece, Place] | None:
    """What is left goes to host memory as far as it fits, else to disk; None where the disk has too low a limit."""
    hosted: dict[_Piece, Place] = {}
    if rest and CPU.name in problem.places and CPU.name not in problem.fastest:
        for better in _fillings_of(problem, rest, [CPU.name], budget):
            hosted = better
    last = [piece for piece in rest if piece not in hosted]
    if sum(piece.num_bytes for piece in last) > problem.limit(DISK):
        return None
    return placed | hosted | dict.fromkeys(last, DISK)


def _fill(
    pieces: Sequence[_Piece], places: Sequence[Place], limits: Sequence[float], kept: int, budget: _Budget
) -> dict[_Piece, Place] | None:
    """The most bytes within the limits; pieces that need more room than ``kept`` to be fetched must be placed.

    None where these alone don't fit.
    """
    classes: dict[tuple[int, bool], list[_Piece]] = {}
    for piece in pieces:
        classes.setdefault((piece.num_bytes, piece.room > kept), []).append(piece)
    # What must be placed comes first, large pieces before small ones: good fillings are then found early.
    keys = sorted(classes, key=lambda key: (not key[1], -key[0]))
    search = _Search([size for size, _must in keys], [must for _size, must in keys], limits, budget)
    counts = search.run([len(classes[key]) for key in keys])
    if counts is None:
        return None
    placed: dict[_Piece, Place] = {}
    for key, column in zip(keys, zip(*counts, strict=True), strict=True):
        waiting = iter(classes[key])
        for place, count in zip(places, column, strict=True):
            placed.update({next(waiting): place for _ in range(count)})
    return placed


@final
class _Search:
    """How many pieces of each size go to each place."""

    def __init__(self, sizes: list[int], must: list[bool], limits: Sequence[float], budget: _Budget) -> None:
        self.sizes, self.must, self.limits = sizes, must, list(limits)
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

    def _place(self, index: int, left: list[int], chosen: list[tuple[int, ...]], placed: int) -> None:
        """Try every filling of the place at ``index`` and of those after it."""
        if index == len(self.limits):
            complete = not any(count for count, must in zip(left, self.must, strict=True) if must)
            if complete and placed > self.best_bytes:
                self.best, self.best_bytes = list(chosen), placed
            return
        rest = sum(size * count for size, count in zip(self.sizes, left, strict=True))
        if placed + min(rest, sum(self.limits[index:])) <= self.best_bytes:
            return
        for counts, num_bytes in self._fillings(self.limits[index], left, 0):
            after = [have - taken for have, taken in zip(left, counts, strict=True)]
            self._place(index + 1, after, [*chosen, counts], placed + num_bytes)
            if self._is_over():
                return

    def _fillings(self, limit: float, left: list[int], first: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Counts of the sizes from ``first`` on that fit into ``limit``, the fullest early."""
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
