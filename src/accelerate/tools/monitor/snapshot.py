"""A run as one JSON object, which the page and the terminal draw; long curves are thinned out here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from .document import Document, Lines, Points, RankState, ShownEvent, Skew, ThinnedPoints
from .reading import KNOWN, Curve, Rank, RunFiles, finite

#: Most points of a curve that are sent, about one per pixel.
MAX_POINTS: Final = 600
#: Up to this many ranks are drawn as lines of their own, more as minimum, median and maximum.
MAX_LINES: Final = 8
_MAX_EVENTS: Final = 300
#: A rank that has written nothing for this long, and no end, counts as silent.
SILENT_SECONDS: Final = 60.0
_PER_RANK: Final = ("step_seconds", "wait_seconds", "memory_bytes")
#: Events that all ranks report alike, shown once.
_SAME_ON_ALL_RANKS: Final = ("epoch", "save", "load", "stop", "start", "restart", "end")


def snapshot(run: RunFiles, *, now: float | None = None) -> Document:
    """Return all that is shown of ``run`` as one JSON object."""
    main = run.main
    now = time.time() if now is None else now
    content: Document = {
        "name": run.folder.name,
        "folder": as_shown(run.folder),
        "version": run.version,
        "now": now,
        "state": state_of(run, now),
        "facts": {} if main is None else main.facts,
        "newest": {} if main is None else {name: _shown(value) for name, value in main.newest.items()},
        "ranks": [_rank(rank, now) for _, rank in sorted(run.ranks.items())],
        "skew": skew(run),
        "curves": {},
        "own": {},
        "per_rank": {},
        "events": events(run),
    }
    if main is None:
        return content
    content["curves"] = {name: thinned(main.curves[name]) for name in KNOWN if name in main.curves}
    own = {**run.logged, **{name: curve for name, curve in main.curves.items() if name not in KNOWN}}
    content["own"] = {name: thinned(curve) for name, curve in sorted(own.items())}
    content["per_rank"] = {name: over_ranks(run, name) for name in _PER_RANK}
    return content


def as_shown(folder: Path) -> str:
    """Return the folder relative to the current or the home directory, where it is below one of them."""
    for start, sign in ((Path.cwd(), ""), (Path.home(), "~/")):
        if folder.is_relative_to(start) and folder != start:
            return f"{sign}{folder.relative_to(start).as_posix()}"
    return str(folder)


def state_of(run: RunFiles, now: float) -> str:
    """Return empty, running, silent, finished, stopped or failed."""
    ranks = list(run.ranks.values())
    if not ranks:
        return "empty"
    endings = [rank.ending for rank in ranks]
    for ending, state in (("error", "failed"), ("stop", "stopped")):
        if ending in endings:
            return state
    if all(ending == "end" for ending in endings):
        return "finished"
    return "silent" if now - max(rank.last_time for rank in ranks) > SILENT_SECONDS else "running"


def skew(run: RunFiles) -> Skew | None:
    """Return how much longer the slowest rank took than the median, at the newest common step; None with one rank."""
    curves = {n: rank.curves["step_seconds"] for n, rank in run.ranks.items() if "step_seconds" in rank.curves}
    if len(curves) < 2:
        return None
    common = set.intersection(*(set(curve.steps[-MAX_POINTS:]) for curve in curves.values()))
    if not common:
        return None
    step = max(common)
    times = {n: curve.values[curve.steps.index(step)] for n, curve in curves.items()}
    middle = statistics.median_low(times.values())
    slowest = max(times, key=lambda rank: times[rank])
    return {"rank": slowest, "share": (times[slowest] - middle) / middle if middle else 0.0}


def _rank(rank: Rank, now: float) -> RankState:
    ending = rank.ending
    silent = ending is None and now - rank.last_time > SILENT_SECONDS
    return {
        "rank": rank.number,
        "device": rank.facts.get("device"),
        "pid": rank.facts.get("pid"),
        "host": rank.facts.get("host"),
        "step": rank.newest.get("step"),
        "seen": rank.last_time,
        "state": {"error": "failed", "stop": "stopped", "end": "finished"}.get(
            ending or "", "silent" if silent else "running"
        ),
        "step_seconds": _shown(rank.newest.get("step_seconds")),
        "wait_seconds": _shown(rank.newest.get("wait_seconds")),
        "memory_bytes": _shown(rank.newest.get("memory_bytes")),
    }


def _shown(value: object) -> object:
    """Return ``value``, or its text for NaN and infinities, which JSON lacks."""
    return value if not isinstance(value, float) or finite(value) is not None else str(value)


def events(run: RunFiles) -> list[ShownEvent]:
    """Return the events, newest last; those that all ranks report alike, once."""
    merged: dict[tuple[object, ...], ShownEvent] = {}
    for event in run.events:
        kind = event.get("event")
        what = (event.get("step"), event.get("epoch"), event.get("folder"), event.get("attempt"))
        key = (kind, *what) if kind in _SAME_ON_ALL_RANKS else (kind, event.get("rank"), event.get("time"), len(merged))
        known = merged.get(key)
        if known is None:
            merged[key] = {**event, "ranks": [event["rank"]]}
        else:
            known["ranks"].append(event["rank"])
    return list(merged.values())[-_MAX_EVENTS:]


def thinned(curve: Curve) -> Points | ThinnedPoints:
    """Return ``steps`` and ``values``; for a long curve the means of neighbours, with their minimum and maximum."""
    size = -(-len(curve.steps) // MAX_POINTS)
    bad = [step for step, value in zip(curve.steps, curve.values, strict=True) if finite(value) is None]
    if size <= 1:
        return {"steps": curve.steps, "values": [finite(value) for value in curve.values], "bad": bad}
    steps: list[int] = []
    parts: list[list[float]] = []
    for start in range(0, len(curve.steps), size):
        steps.append(curve.steps[min(start + size, len(curve.steps)) - 1])
        parts.append([value for value in curve.values[start : start + size] if finite(value) is not None])
    return {
        "steps": steps,
        "values": [statistics.fmean(part) if part else None for part in parts],
        "low": [min(part, default=None) for part in parts],
        "high": [max(part, default=None) for part in parts],
        "bad": bad[:MAX_POINTS],
    }


def over_ranks(run: RunFiles, name: str) -> Lines:
    """Return a curve for each rank; for many ranks the minimum, median and maximum at each step."""
    curves = {n: rank.curves[name] for n, rank in sorted(run.ranks.items()) if name in rank.curves}
    if len(curves) <= MAX_LINES:
        return {"lines": {f"rank {n}": thinned(curve) for n, curve in curves.items()}}
    at: dict[int, list[float]] = {}
    for curve in curves.values():
        for step, value in zip(curve.steps, curve.values, strict=True):
            if finite(value) is not None:
                at.setdefault(step, []).append(value)
    whole = {step: values for step, values in sorted(at.items()) if 2 * len(values) >= len(curves)}
    return {"lines": {label: thinned(_summary(whole, pick)) for label, pick in _PICKS.items()}}


def _summary(at: Mapping[int, Sequence[float]], pick: Callable[[Sequence[float]], float]) -> Curve:
    return Curve(list(at), [pick(values) for values in at.values()])


_PICKS: Final = {"slowest or largest": max, "middle": statistics.median, "fastest or smallest": min}
