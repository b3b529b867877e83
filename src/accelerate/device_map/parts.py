"""A model as the planners see it: a tree of parts with sizes, ties between them, and devices with limits."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import nn

from ..devices import CPU
from ..memory import convert_bytes
from .budget import Place, accelerators_in
from .sizes import own_parts
from .tensors import DISK


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A module, or one tensor of a module that is split."""

    name: str
    kind: str
    num_bytes: int
    buffer_bytes: int
    parts: tuple[Part, ...]  # what it is split into; empty where it is never split
    is_tensor: bool = False

    @cached_property
    def largest_layer(self) -> int:
        """The bytes of the largest piece that has to be on one device as a whole when it runs."""
        return max((part.largest_layer for part in self.parts if not part.is_tensor), default=self.num_bytes)

    def holds(self, name: str) -> bool:
        """Whether the tensor or module of that name is this part or lies in it."""
        return not self.name or name == self.name or name.startswith(f"{self.name}.")

    def atoms(self) -> Iterable[Part]:
        """The pieces that are never split, in the order of definition."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.atoms()


def parts_of(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    sizes: Mapping[str, int],
    buffer_sizes: Mapping[str, int],
    no_split: frozenset[str],
) -> list[Part]:
    """The named modules and tensors as parts."""

    def part_of(name: str, module: nn.Module | torch.Tensor) -> Part:
        splits = isinstance(module, nn.Module) and type(module).__name__ not in no_split and any(module.children())
        inner = own_parts(module) if isinstance(module, nn.Module) and splits else []
        return Part(
            name,
            type(module).__name__,
            sizes.get(name, 0),
            buffer_sizes.get(name, 0),
            tuple(part_of(f"{name}.{own}", each) for own, each in inner),
            is_tensor=isinstance(module, torch.Tensor),
        )

    return [part_of(name, module) for name, module in modules]


@final
@dataclass(frozen=True)
class Problem:
    """What is to be placed, and where it may go."""

    parts: tuple[Part, ...]
    places: tuple[Place, ...]  # fastest first
    limits: Mapping[Place, Any]  # bytes
    ties: tuple[frozenset[str], ...]  # names of one and the same tensor

    @property
    def accelerators(self) -> list[Place]:
        """The places where layers run, fastest first; none on a machine without."""
        return accelerators_in(self.limits)

    @property
    def fastest(self) -> list[Place]:
        """The places from which nothing has to be fetched before it runs."""
        return self.accelerators or [CPU.name]

    @property
    def through(self) -> list[Place]:
        """The places that need room for the layers that lie on slower ones, because those pass through them."""
        accelerators = self.accelerators
        if not accelerators:
            return [CPU.name]
        return accelerators[:1] if isinstance(accelerators[0], str) else [accelerators[0], CPU.name]

    def limit(self, place: Place) -> float:
        """The bytes that may lie there."""
        return self.limits.get(place, math.inf if place == DISK else 0)

    def outside_ties(self, part: Part) -> list[str]:
        """The names outside ``part`` of tensors that are also in it."""
        return [
            name
            for group in self.ties
            if any(part.holds(name) for name in group)
            for name in group
            if not part.holds(name)
        ]


@final
@dataclass(frozen=True)
class Decision:
    """One row of a plan."""

    part: Part
    place: Place
    why: str

    def row(self) -> tuple[str, ...]:
        """The decision as text, column by column."""
        return self.part.name, self.part.kind, convert_bytes(self.part.num_bytes), str(self.place), self.why


@final
class DevicePlan(OrderedDict[str, Any]):
    """A device map, module to device, that explains itself when printed."""

    problem: Problem | None = None
    decisions: Sequence[Decision] = ()
    method: str = ""

    @classmethod
    def of(cls, problem: Problem, decisions: Sequence[Decision], method: str) -> DevicePlan:
        """The plan that consists of these decisions."""
        plan = cls((each.part.name, each.place) for each in decisions)
        plan.problem, plan.decisions, plan.method = problem, tuple(decisions), method
        return plan

    def num_bytes_on(self, places: Iterable[Place]) -> int:
        """The bytes that lie on any of the places."""
        wanted = set(places)
        return sum(each.part.num_bytes for each in self.decisions if each.place in wanted)

    def __str__(self) -> str:
        if self.problem is None:
            return repr(self)
        rows = [
            (
                each.part.name or "(the model)",
                each.part.kind,
                convert_bytes(each.part.num_bytes),
                str(each.place),
                each.why,
            )
            for each in self.decisions
        ]
        table = _aligned([("part", "class", "size", "place", "why"), *rows])
        filled = [
            (str(place), f"{convert_bytes(self.num_bytes_on([place]))} of {_limit_text(self.problem.limit(place))}")
            for place in self.problem.places
        ]
        return "\n".join([f"Device map ({self.method})", *table, "", *_aligned(filled)])


def _limit_text(limit: float) -> str:
    return "no limit" if math.isinf(limit) else convert_bytes(limit)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
