"""A run as one JSON object for the page and the terminal: its ranks compared, and long curves thinned out."""

from __future__ import annotations

import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from ...wording import some_ranks
from .document import Clock, Document, Event, Facts, Lines, Points, RankState, ShownEvent, Skew, Spread, ThinnedPoints
from .hours import hours
from .reading import KNOWN, SAME_ON_ALL_RANKS, Curve, Rank, RunFiles, finite, note_of, number
from .records import arguments_of

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
    if not run.ranks:
        return "empty"
    return _state(_ending(run), run.last_time, now)


def state_of_rank(rank: Rank, now: float) -> str:
    """Return the rank's state: running, silent, finished, preempted, stopped or failed."""
    return _state(rank.ending, rank.last_time, now)


def _state(ending: str | None, last_time: float, now: float) -> str:
    if ending is None:
        return "silent" if now - last_time > SILENT_SECONDS else "running"
    return _STATES[ending]


def _ending(run: RunFiles) -> str | None:
    """Return the event that ended the run, the worst one of all ranks; None if it still runs."""
    endings = {rank.ending for rank in run.ranks.values()}
    worst = next((ending for ending in ("error", "killed", "stop", "preempted") if ending in endings), None)
    return "end" if endings == {"end"} else worst


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
    newest = [set(curve.steps[-_NEWEST_STEPS:]) for curve in curves.values()]
    common = set[int].intersection(*newest) if newest else set[int]()
    step = max(common, default=None)
    return {} if step is None else {n: curve.values[curve.steps.index(step)] for n, curve in curves.items()}


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


# --------------------------------------------------------------------------------------------------
# The document of a run

#: The maximum number of points sent per curve, about one per pixel.
MAX_POINTS: Final = 600
#: The maximum number of ranks with separate lines; more are drawn as minimum, median and maximum.
MAX_LINES: Final = 8
_MAX_EVENTS: Final = 300
#: The maximum number of ranks named for an event of a large run.
_MAX_NAMED: Final = 8


def snapshot(run: RunFiles, *, now: float | None = None) -> Document:
    """Return the shown state of ``run`` as one JSON object; in a large run, follow the ranks that stand out."""
    main, note = run.main, note_of(run)
    now = time.time() if now is None else now
    outliers = standing_out(run.ranks.values(), now) if run.is_large else {}
    run.choose(number for number, why in outliers.items() if why)
    followed = sum(rank.is_followed for rank in run.ranks.values())
    content: Document = {
        **note,
        "name": note["name"] or run.folder.name,
        "folder": as_shown(run.folder),
        "version": run.version,
        "now": now,
        "state": state_of(run, now),
        "facts": main.facts,
        "newest": {name: json_value(value) for name, value in main.newest.items()},
        "seen": run.last_time,
        "num_ranks": len(run.ranks),
        "num_followed": followed,
        "states": dict(Counter(state_of_rank(rank, now) for rank in run.ranks.values())),
        "spread": spread(run.ranks.values()) if run.is_large else {},
        "ranks": [_rank(run.ranks[n], now, outliers.get(n, "")) for n in sorted(outliers or run.ranks)],
        "skew": skew(run),
        "why": why_ended(run),
        "began": main.first_time,
        "clock": _clock(main),
        "settings": settings(run),
        "output": run.output.read(),
        "hours": hours(run.folder),
        "curves": {},
        "own": {},
        "per_rank": {},
        "events": events(run),
    }
    if not run.ranks:
        return content
    content["curves"] = {name: thinned(main.curves[name]) for name in KNOWN if name in main.curves}
    own = {**run.logged, **{name: curve for name, curve in main.curves.items() if name not in KNOWN}}
    content["own"] = {name: thinned(curve) for name, curve in sorted(own.items())}
    content["per_rank"] = {name: over_ranks(run, name) for name in (*PER_RANK, "device_utilization")}
    return content


def as_shown(folder: Path) -> str:
    """Return the folder relative to the current or the home directory if it is below one of them."""
    for start, sign in ((Path.cwd(), ""), (Path.home(), "~/")):
        if folder.is_relative_to(start) and folder != start:
            return f"{sign}{folder.relative_to(start).as_posix()}"
    return str(folder)


def why_ended(run: RunFiles) -> str:
    """Return in a few words how the run ended; empty if it still runs.

    If several ranks ended, the first end of the worst kind counts, because it often caused the others.
    """
    kind = _ending(run)
    if kind is None:
        return ""
    events = [reported for reported in run.events if reported.event["event"] in (kind, "restart")]
    begin = max((at for at, each in enumerate(events) if each.event["event"] == "restart"), default=-1) + 1
    found = next((each for each in events[begin:] if each.event["event"] == kind), None)
    if found is None:
        return ""
    who = f" ({some_ranks(found.ranks, _MAX_NAMED)})" if len(run.ranks) > 1 else ""
    return describe(found.event) + ("" if kind in SAME_ON_ALL_RANKS else who)


def _clock(rank: Rank) -> Clock:
    times = dict(zip(rank.times.steps, rank.times.values, strict=True))
    epochs = dict(zip(rank.epochs.steps, rank.epochs.values, strict=True))
    size = max(1, -(-len(times) // MAX_POINTS))
    steps = list(times)
    steps = sorted({*steps[::size], *steps[-1:]})
    return {
        "steps": steps,
        "times": [finite(times[step]) for step in steps],
        "epochs": [finite(epochs.get(step)) for step in steps],
    }


def settings(run: RunFiles) -> Facts:
    """Return the run's settings: the arguments of its command, the trackers' configuration, the main rank's facts."""
    facts = run.main.facts
    arguments, config = arguments_of(str(facts.get("command") or "")), _flat(run.config, "")
    known = {name: value for name, value in facts.items() if name not in ("rank", "pid") and value is not None}
    return {**_flat(arguments, ""), **config, **known, **config}  # the configuration first, and before equal names


def _flat(config: Mapping[str, object], prefix: str) -> Facts:
    """Return nested settings as one level, with dotted names."""
    found: Facts = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found.update(_flat(cast("Facts", value), f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = json_value(value)
    return found


def _rank(rank: Rank, now: float, why: str) -> RankState:
    return {
        "rank": rank.number,
        "device": rank.facts.get("device"),
        "pid": rank.facts.get("pid"),
        "host": rank.facts.get("host"),
        "step": rank.newest.get("step"),
        "seen": rank.last_time,
        "state": state_of_rank(rank, now),
        "step_seconds": json_value(rank.newest.get("step_seconds")),
        "wait_seconds": json_value(rank.newest.get("wait_seconds")),
        "memory_bytes": json_value(rank.newest.get("memory_bytes")),
        "why": why,
    }


def json_value(value: object) -> object:
    """Return ``value``; for NaN and infinities, which JSON lacks, its text."""
    return value if not isinstance(value, float) or finite(value) is not None else str(value)


def events(run: RunFiles) -> list[ShownEvent]:
    """Return the events, newest last; equal events of all ranks once, and only the newest of repeated notes."""
    shown: list[ShownEvent] = []
    repeated: dict[tuple[str, str, int], int] = {}
    sample = run.sample
    for reported in run.events[-_MAX_EVENTS:]:
        ranks, count = sorted(reported.ranks), len(reported.ranks)
        if run.is_large:
            is_common = reported.event["event"] in SAME_ON_ALL_RANKS and sample <= reported.ranks.keys()
            ranks, count = ranks[:_MAX_NAMED], len(run.ranks) if is_common else count
        event: ShownEvent = {**reported.event, "ranks": ranks, "num_ranks": count, "times": 1}
        if event["event"] in ("note", "warning"):
            key = (event["event"], event.get("text", ""), event["rank"])
            if (at := repeated.get(key)) is not None:
                event["times"] += shown[at]["times"]
                shown[at]["times"] = 0  # the newest one has the count
            repeated[key] = len(shown)
        shown.append(event)
    return [event for event in shown if event["times"]]


def thinned(curve: Curve) -> Points | ThinnedPoints:
    """Return ``steps`` and ``values``; for a long curve, the means of neighbours with their minimum and maximum."""
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
    """Return a curve for each followed rank; for many of them, the minimum, median and maximum at each step."""
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


def describe(event: Event) -> str:
    """Describe an event in a few words."""
    kind = event.get("event")
    folder = str(event.get("folder") or "").rpartition("/")[2]
    texts = {
        "start": "started",
        "restart": f"restarted (attempt {event.get('attempt')})",
        "save": f"saved {folder}",
        "load": f"resumed from {folder or 'a checkpoint'}",
        "epoch": f"epoch {event.get('epoch')} done",
        "end": "finished",
        "stop": f"stopped: {event.get('text')}",
        "error": f"failed: {event.get('text')}",
        "killed": f"ended: {event.get('text')}",
        "preempted": f"preempted by {event.get('text')}, after {folder} was saved",
    }
    return texts.get(str(kind)) or str(event.get("text") or kind)
