"""The documented rules: strictly in order, a device that has been left is never visited again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from ..errors import SettingError
from ..memory import convert_bytes
from .budget import Place
from .parts import Decision, Part, Problem
from .tied import partners_in

_log = logging.getLogger(__name__)


def place_greedily(problem: Problem, fallback_allocation: bool = False) -> list[Decision]:
    """A place for every part.

    Raises:
        SettingError: every place has a limit, and together they are too small.
    """
    return _Greedy(problem, fallback_allocation).run()


def first_that_fits(waiting: Sequence[Part], room: float, problem: Problem) -> tuple[Part | None, list[Part]]:
    """The first part, breadth first, that fits into ``room`` without a tie to the others; and what then waits."""
    level = [(part, [*waiting[:index]], [*waiting[index + 1 :]]) for index, part in enumerate(waiting)]
    while level:
        below: list[tuple[Part, list[Part], list[Part]]] = []
        for part, before, after in level:
            if part.num_bytes <= room and not problem.outside_ties(part):
                return part, [*before, *after]
            below += [
                (each, [*before, *part.parts[:index]], [*part.parts[index + 1 :], *after])
                for index, each in enumerate(part.parts)
            ]
        level = below
    return None, list(waiting)


@final
class _Greedy:
    def __init__(self, problem: Problem, fallback_allocation: bool) -> None:
        self.problem = problem
        self.waiting = list(problem.parts)
        self.places = list(problem.places)
        self.used: dict[Place, int] = dict.fromkeys(self.places, 0)
        self.fallback_allocation = fallback_allocation
        self.decisions: list[Decision] = []
        self.why_next = ""

    def run(self) -> list[Decision]:
        while self.waiting:
            part = self.waiting.pop(0)
            room = self._room()
            partners = self._partners(part)
            together = part.num_bytes + sum(each.num_bytes for each in partners)
            if together <= room:
                self._place(part, partners)
            elif part.num_bytes <= room:
                self._split_a_partner(part, partners)
            elif part.parts:
                self.waiting[:0] = part.parts
            else:
                self._leave(part, room)
        return self.decisions

    def _reserve(self) -> int:
        """Room for the largest layer that may have to pass through this place later; a single tensor is no layer."""
        return self._reserve_without(None)

    def _room(self) -> float:
        place = self.places[0]
        return self.problem.limit(place) - self.used[place] - self._reserve()

    def _partners(self, part: Part) -> list[Part]:
        """The waiting parts that share a tensor with this one, and those that share one with them."""
        found: list[int] = []
        names = self.problem.outside_ties(part)
        waiting = [(each.name, each) for each in self.waiting]
        while names:
            new = [index for index in partners_in(names, waiting) if index not in found]
            found += new
            names = [name for index in new for name in self.problem.outside_ties(self.waiting[index])]
        return [self.waiting[index] for index in sorted(found)]

    def _place(self, part: Part, partners: Sequence[Part]) -> None:
        place = self.places[0]
        why = self.why_next or "fits"
        for each in (part, *partners):
            self.decisions.append(Decision(each, place, why))
            self.used[place] += each.num_bytes
            why = f"tied to {part.name}"
        self.waiting = [each for each in self.waiting if not any(each is other for other in partners)]

    def _split_a_partner(self, part: Part, partners: Sequence[Part]) -> None:
        """The first partner that can be split is split, and the part tried again; else the next place is tried."""
        self.waiting.insert(0, part)
        for partner in partners:
            if partner.parts:
                index = next(i for i, each in enumerate(self.waiting) if each is partner)
                self.waiting[index : index + 1] = partner.parts
                return
        self._next_place(part, f"with what it is tied to it doesn't fit on {self.places[0]}")

    def _leave(self, part: Part, room: float) -> None:
        self.waiting.insert(0, part)
        place = self.places[0]
        if self.fallback_allocation and not self.used[place]:
            found, rest = first_that_fits(self.waiting, room, self.problem)
            if found is not None:
                self.waiting = rest
                self.why_next = f"the first that fits on {place}"
                self._place(found, ())
                self.why_next = ""
                return
        self._next_place(part, f"{place} has {convert_bytes(max(room, 0))} left")

    def _next_place(self, part: Part, why: str) -> None:
        place = self.places[0]
        if not self.used[place]:
            needed = part.num_bytes + self._reserve_without(part)
            _log.warning(
                "No modules could be assigned to device %s due to insufficient memory: its limit is %s, and the first "
                "part that waits, %s, needs %s there with the room that is kept for later layers.\n  - %s: %s required",
                place,
                convert_bytes(self.problem.limit(place)),
                part.name,
                convert_bytes(needed),
                place,
                f"{needed} bytes",
            )
        if len(self.places) == 1:
            raise SettingError(
                f"The limits in max_memory are too small for the model: {part.name} "
                f"({convert_bytes(part.num_bytes)}) has no place, because {why}. Raise a "
                "limit, or leave 'disk' without one."
            )
        self.places.pop(0)
        self.why_next = why

    def _reserve_without(self, part: Part | None) -> int:
        if self.places[0] not in self.problem.through:
            return 0
        layers = (each for each in self.waiting if each is not part and not each.is_tensor)
        return max((each.largest_layer for each in layers), default=0)
