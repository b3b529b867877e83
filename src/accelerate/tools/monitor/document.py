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
    """One event of all ``ranks`` that report it alike; of a large run ``ranks`` are the first of ``num_ranks``."""

    ranks: list[int]
    num_ranks: int


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
    why: str  # it is listed, of a large run


class Spread(TypedDict):
    """One number over the ranks as it is now."""

    smallest: float
    middle: float
    ninetieth: float  # percentile
    ninety_ninth: float
    largest: float


class Document(TypedDict):
    """A run as it is now.

    ``seen`` is when the last rank to write anything did. Of a large run ``ranks`` are those
    that stand out, and ``per_rank`` is over ``num_followed`` ranks, those among them.
    """

    name: str
    folder: str
    version: int
    now: float
    state: str
    facts: Facts
    newest: Facts
    seen: float
    num_ranks: int
    num_followed: int
    states: dict[str, int]
    spread: dict[str, Spread]
    ranks: list[RankState]
    skew: Skew | None
    curves: dict[str, Points]
    own: dict[str, Points]
    per_rank: dict[str, Lines]
    events: list[ShownEvent]
