"""Compare the ranks of a run: their states, the spread of their numbers, and outliers."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from .document import Skew, Spread
from .reading import Curve, Rank, RunFiles, finite, number

#: The numbers that differ between ranks.
PER_RANK: Final = ("step_seconds", "wait_seconds", "memory_bytes")
#: A rank that has written nothing for this long, and no end, counts as silent.
SILENT_SECONDS: Final = 60.0
#: The maximum number of ranks to list for each reason, and of ranks with the largest numbers but no reason.
_NUM_LISTED: Final = 8
_NUM_ALWAYS: Final = 2
_SHARE: Final = 0.02
_TEXTS: Final = {
    "step_seconds": "{:+.0%} step time",
    "wait_seconds": "{:+.0%} of a step waiting for data",
    "memory_bytes": "{:+.0%} memory",
}
_NEWEST_STEPS: Final = 600
#: Event that ended a rank -> the rank's state.
_STATES: Final = {
    "error": "failed", "killed": "failed", "stop": "stopped", "preempted": "preempted", "end": "finished",
}  # fmt: skip


def state_of(run: RunFiles, now: float) -> str:
    """Return the run's state: empty, running, silent, finished, preempted, stopped or failed."""
    ranks = list(run.ranks.values())
    if not ranks:
        return "empty"
    endings = {rank.ending for rank in ranks}
    for ending in ("error", "killed", "stop", "preempted"):
        if ending in endings:
            return _STATES[ending]
    if endings == {"end"}:
        return "finished"
    return "silent" if now - max(rank.last_time for rank in ranks) > SILENT_SECONDS else "running"


def state_of_rank(rank: Rank, now: float) -> str:
    """Return the rank's state: running, silent, finished, preempted, stopped or failed."""
    if rank.ending is None:
        return "silent" if now - rank.last_time > SILENT_SECONDS else "running"
    return _STATES[rank.ending]


def skew(run: RunFiles) -> Skew | None:
    """Return how much longer than the median the slowest rank took; None with one rank.

    It uses the newest step that all ranks have reported; in a large run, each rank's newest report.
    """
    times = _newest(run.ranks.values(), "step_seconds") if run.is_large else _at_common_step(run)
    if len(times) < 2:
        return None
    middle = statistics.median_low(times.values())
    slowest = max(times, key=lambda rank: times[rank])
    return {"rank": slowest, "share": (times[slowest] - middle) / middle if middle else 0.0}


def _at_common_step(run: RunFiles) -> dict[int, float]:
    curves = {n: rank.curves["step_seconds"] for n, rank in run.ranks.items() if "step_seconds" in rank.curves}
    common = set[int].intersection(*map(_newest_steps, curves.values())) if curves else set[int]()
    step = max(common, default=None)
    return {} if step is None else {n: curve.values[curve.steps.index(step)] for n, curve in curves.items()}


def _newest_steps(curve: Curve) -> set[int]:
    return set(curve.steps[-_NEWEST_STEPS:])


def _newest(ranks: Iterable[Rank], name: str) -> dict[int, float]:
    """Return the number ``name`` of each rank's newest report, if it is finite."""
    known = ((rank.number, finite(number(rank.newest.get(name)))) for rank in ranks)
    return {rank: value for rank, value in known if value is not None}


def spread(ranks: Iterable[Rank]) -> dict[str, Spread]:
    """Return minimum, median, 90th and 99th percentile and maximum of each number in the ranks' newest reports."""
    ranks = list(ranks)
    found: dict[str, Spread] = {}
    for name in PER_RANK:
        values = sorted(_newest(ranks, name).values())
        if values:
            found[name] = {
                "smallest": values[0],
                "middle": _at(values, 0.5),
                "ninetieth": _at(values, 0.9),
                "ninety_ninth": _at(values, 0.99),
                "largest": values[-1],
            }
    return found


def _at(values: Sequence[float], share: float) -> float:
    """Return the quantile of the sorted ``values``: the smallest that this share of them doesn't exceed."""
    return values[min(len(values) - 1, max(0, -(-int(share * 1000) * len(values) // 1000) - 1))]


def standing_out(ranks: Iterable[Rank], now: float) -> dict[int, str]:
    """Return the ranks that stand out, each with the reason: a rare state, or a number above the median.

    Ranks with the largest numbers are also listed, without a reason, if these are hardly above the median.
    """
    ranks = list(ranks)
    reasons: dict[int, list[str]] = {}
    states = {rank.number: state_of_rank(rank, now) for rank in ranks}
    usual = statistics.mode(states.values()) if states else ""
    for state in ("failed", "silent", "stopped", "finished", "running"):
        others = (number for number, found in states.items() if found == state != usual)
        for rank in heapq.nsmallest(_NUM_LISTED, others):
            reasons.setdefault(rank, []).append(state)
    steps = _newest(ranks, "step_seconds")
    step = statistics.median(steps.values()) if steps else 0.0
    for name, text in _TEXTS.items():
        values = _newest(ranks, name)
        middle = statistics.median(values.values()) if values else 0.0
        whole = step if name == "wait_seconds" and step else middle
        for place, rank in enumerate(heapq.nlargest(_NUM_LISTED, values, key=values.__getitem__)):
            share = (values[rank] - middle) / whole if whole else 0.0
            if share > _SHARE:
                reasons.setdefault(rank, []).append(text.format(share))
            elif place < _NUM_ALWAYS:
                reasons.setdefault(rank, [])
    return {rank: ", ".join(listed) for rank, listed in reasons.items()}
