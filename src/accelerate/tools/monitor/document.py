"""The types of the JSON document that shows a run, which the page, the terminal and the exported file have in common.

Files of a run may come from another version, so facts, numbers and events hold whatever their lines hold: readers of
`Facts` check what they take.
"""

from __future__ import annotations

from typing import TypedDict

#: One line of a run's file, or a part of it: JSON values by name.
Facts = dict[str, object]


class _EventFacts(TypedDict, total=False):
    step: int | None
    epoch: int | None
    folder: str | None
    attempt: int
    text: str


class Event(_EventFacts):
    """One event of a rank, with the facts of its kind."""

    time: float
    event: str
    rank: int


class ShownEvent(Event):
    """One event of all ``ranks`` that report it alike."""

    ranks: list[int]


class Points(TypedDict):
    """One curve; ``bad`` are the steps whose values are no finite numbers."""

    steps: list[int]
    values: list[float | None]
    bad: list[int]


class ThinnedPoints(Points):
    """A long curve, whose values are means of neighbours, with the smallest and the largest of them."""

    low: list[float | None]
    high: list[float | None]


class Lines(TypedDict):
    """The curves of one number on the ranks, by label."""

    lines: dict[str, Points]


class Skew(TypedDict):
    """The slowest rank, and how much longer than the median rank it took, as a fraction."""

    rank: int
    share: float


class RankState(TypedDict):
    """One rank as it is now; the numbers are those of its newest report."""

    rank: int
    device: object
    pid: object
    host: object
    step: object
    seen: float
    state: str
    step_seconds: object
    wait_seconds: object
    memory_bytes: object


class Document(TypedDict):
    """A run as it is now."""

    name: str
    folder: str
    version: int
    now: float
    state: str
    facts: Facts
    newest: Facts
    ranks: list[RankState]
    skew: Skew | None
    curves: dict[str, Points]
    own: dict[str, Points]
    per_rank: dict[str, Lines]
    events: list[ShownEvent]
