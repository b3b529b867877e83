"""The types of the JSON document of a run, which the page, the terminal and the exported file share.

Files of a run may come from another version, so facts, numbers and events have the unchecked content of their lines:
readers of `Facts` check the values that they use.
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
    seconds: float


class Event(_EventFacts):
    """One event of a rank, with the facts of its kind."""

    time: float
    event: str
    rank: int


class ShownEvent(Event):
    """One event of all ``ranks`` that report the same; in a large run ``ranks`` are the first of ``num_ranks``."""

    ranks: list[int]
    num_ranks: int
    times: int  # how often a note or a warning was repeated


class Clock(TypedDict):
    """The time at which the main rank reported each step (seconds since 1970), and the step's epoch."""

    steps: list[int]
    times: list[float | None]
    epochs: list[float | None]


class Output(TypedDict):
    """The last lines of the newest log file in the run's folder."""

    file: str
    lines: list[str]


class RunNote(TypedDict):
    """The name, tags and note of a run, as its script or a reader of the page has given them."""

    name: str
    tags: list[str]
    note: str


class RunSummary(RunNote):
    """A short summary of one run of several.

    ``why`` is how it ended, ``settings`` are those that differ between the runs, and ``numbers`` the last values.
    """

    run: str
    state: str
    why: str
    began: float
    seen: float
    step: object
    num_ranks: int
    settings: Facts
    numbers: Facts


class RunList(TypedDict):
    """The runs of a folder, newest first; ``is_one`` is true for a folder that is a run itself."""

    folder: str
    is_one: bool
    num_found: int
    runs: list[RunSummary]


class Points(TypedDict):
    """One curve; ``bad`` are the steps whose values aren't finite."""

    steps: list[int]
    values: list[float | None]
    bad: list[int]


class ThinnedPoints(Points):
    """A long curve, with means of neighbouring values, and their minimum and maximum."""

    low: list[float | None]
    high: list[float | None]


class Lines(TypedDict):
    """The curves of one number on several ranks, by label."""

    lines: dict[str, Points]


class Skew(TypedDict):
    """The slowest rank, and how much longer than the median rank it took, as a fraction."""

    rank: int
    share: float


class RankState(TypedDict):
    """The current state of one rank; the numbers are those of its newest report."""

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
    why: str  # why it is listed, in a large run


class Spread(TypedDict):
    """The current spread of one number over the ranks."""

    smallest: float
    middle: float
    ninetieth: float  # percentile
    ninety_ninth: float
    largest: float


class Hours(TypedDict):
    """How the time of a run was spent, from its first start to its last sign of life; ``goodput`` is a fraction."""

    began: float
    wall_seconds: float
    seconds: dict[str, float]  # by kind; repeated steps count only once
    goodput: float
    starts: int
    updates: int
    lost_updates: int


class Document(RunNote):
    """The current state of a run.

    ``seen`` is the time of the last write of any rank. In a large run, ``ranks`` are those that stand out, and
    ``per_rank`` covers ``num_followed`` ranks, which include them.
    """

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
    why: str
    began: float
    clock: Clock
    settings: Facts
    output: Output | None
    hours: Hours | None
    curves: dict[str, Points]
    own: dict[str, Points]
    per_rank: dict[str, Lines]
    events: list[ShownEvent]
