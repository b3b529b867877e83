"""What an evaluation showed, and the first difference between the evaluations of two runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any, Final, final

_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:\.(\d+))?(?:[eE]([-+]?\d+))?|\b(?:nan|inf)\b)")
#: What follows a number that depends on the machine or on the layout, and what stands before it or is its name.
_UNIT: Final = re.compile(
    r"\s*(?:[mun]?s|sec\w*|min\w*|it/s|\w+/s|[KMG]i?B|steps?|batch\w*|iterations?|process\w*|ranks?|GPUs?)\b"
)
_NAME: Final = re.compile(
    r"(?:time|elapsed|took|seconds?|memory|per_sec|throughput|speed|steps?|batch\w*|iter\w*|process\w*|rank)"
    r"\W*$", re.IGNORECASE
)  # fmt: skip
#: How the names of gathered, reduced and logged values begin.
GATHERED: Final = "gather"
REDUCED: Final = "reduce at line "
LOGGED: Final = "logged "
#: Numbers below are compared as if they were as large.
_LEAST: Final = 1e-6


@final
@dataclass
class Shown:
    """The numbers that a script gathered, logged or printed under one name, in one evaluation.

    Attributes:
        line: of the script.
        rows: how many rows were gathered; 0 for numbers that aren't rows.
        num_values: how many numbers the rows have.
        numbers: each with what it was rounded to (0: not rounded); of rows, their sum and the sum of their squares.
    """

    line: int
    rows: int = 0
    num_values: int = 0
    numbers: list[list[float]] = field(default_factory=list[list[float]])

    def values(self) -> list[float]:
        """Return the numbers; of rows, their mean and the root of their mean square."""
        if not self.rows:
            return [number for number, _ in self.numbers]
        total, square = (number / max(self.num_values, 1) for number, _ in self.numbers)
        return [total, math.sqrt(square)]


@final
@dataclass
class Evaluation:
    """The evaluation between two steps.

    Attributes:
        num_steps: how many steps came before it.
        draws: it drew random numbers.
        shown: what the script gathered, logged or printed, by name.
    """

    num_steps: int
    draws: bool = False
    shown: dict[str, Shown] = field(default_factory=dict[str, Shown])

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation of a record's file."""
        return cls(given["num_steps"], given["draws"], {name: Shown(**each) for name, each in given["shown"].items()})


@final
@dataclass(frozen=True)
class EvaluationDifference:
    """A difference between evaluations.

    Attributes:
        are_rows: the number of rows differs, not a value.
        is_alone: only some ranks of the run show the value, so it may be that of their own samples.
    """

    name: str
    text: str
    line: int
    are_rows: bool = False
    is_alone: bool = False
    factor: float | None = None


def parsed(text: str) -> tuple[str, list[list[float]]]:
    """Return a printed text without its numbers, and the numbers that are compared, each with its rounding."""
    numbers: list[list[float]] = []
    for found in _NUMBER.finditer(text):
        if not _UNIT.match(text, found.end()) and is_compared(text[: found.start()]):
            decimals, exponent = len(found[1] or ""), int(found[2] or 0)
            numbers.append([float(found[0]), 10.0 ** (exponent - decimals) if decimals or exponent else 0.0])
    return _NUMBER.sub("{}", text).strip(), numbers


def is_compared(name: str) -> bool:
    """Return whether a number with this name is the same in all layouts and on all machines: no time, no counter."""
    return _NAME.search(name) is None


def distance(one: Shown, other: Shown) -> float:
    """Return the largest relative difference of two lists of numbers, beyond what they were rounded by."""
    return max(_distances(one, other), default=0.0)


def _distances(one: Shown, other: Shown) -> list[float]:
    values, others, found = one.values(), other.values(), list[float]()
    for place, (before, after) in enumerate(zip(values, others, strict=False)):
        scale = max(abs(values[-1]), abs(others[-1])) if one.rows else max(abs(before), abs(after))
        apart = max(abs(before - after) - 1.01 * one.numbers[place][1], 0.0) / max(scale, _LEAST)
        is_same = before == after or (math.isnan(before) and math.isnan(after))
        found.append(0.0 if is_same else apart if math.isfinite(apart) else math.inf)
    return found


def differences(
    reference: Sequence[Evaluation],
    run: Sequence[Evaluation],
    bound_of: Callable[[str], float | None],
) -> Iterator[EvaluationDifference]:
    """Yield the differences of an evaluation from the reference's, each given by rank.

    A value that each rank computed from its own samples counts as its mean over the ranks. What is gathered or reduced
    may differ as `_may_differ` says, if the results that are shown of it agree.

    Args:
        bound_of: returns the largest relative difference for a name; None if it isn't compared.
    """
    if any(each.draws for each in (*reference, *run)):
        return
    found = {each.name: (each, may_differ) for each, may_differ in _differences(reference, run, bound_of)}
    for name, (difference, may_differ) in found.items():
        if not may_differ or not _agrees_later(name, reference[0].shown, found):
            yield difference


def _may_differ(name: str, distances: Sequence[float], bound: float) -> bool:
    """Return whether a value that depends on the layout can have a result that doesn't.

    A reduced sum over micro-batches depends on their number. Of rows with a loss of each batch, the mean doesn't
    depend on how samples are batched, and the root mean square does.
    """
    return name.startswith(REDUCED) or (name.startswith(GATHERED) and distances[0] <= bound)


def _agrees_later(name: str, shown: Mapping[str, Shown], found: Container[str]) -> bool:
    """Return whether results are logged or printed after a gathered or reduced value, and all agree."""
    later = dropwhile(lambda each: each != name, shown)
    results = [each for each in later if _is_result(each, shown[each])]
    return bool(results) and not any(each in found for each in results)


def _is_result(name: str, shown: Shown) -> bool:
    """Return whether numbers are logged, or printed with decimals: a whole number may be that of the epoch."""
    return name.startswith(LOGGED) or any(rounding for _, rounding in shown.numbers)


def _differences(
    reference: Sequence[Evaluation], run: Sequence[Evaluation], bound_of: Callable[[str], float | None]
) -> Iterator[tuple[EvaluationDifference, bool]]:
    """Yield the differences, and whether each may be one of the layout only."""
    for name in dict.fromkeys(name for each in reference for name in each.shown):
        before, after = ([each.shown[name] for each in ranks if name in each.shown] for ranks in (reference, run))
        if not after:
            continue
        is_alone = len(after) < len(run) and (len(before), len(reference)) != (len(after), len(run))
        expected, found = _mean(before), _mean(after)
        # One row of each rank with all its samples is another shape of the same values.
        has_all_values = found.num_values == expected.num_values
        if expected.rows and found.rows % expected.rows and not has_all_values:  # a value of each rank gives more
            text = f"{found.rows} rows instead of {expected.rows}"
            factor = found.rows / expected.rows
            yield EvaluationDifference(name, text, found.line, True, is_alone, factor), False
            continue
        bound, distances = bound_of(name), _distances(expected, found)
        if bound is not None and len(expected.numbers) == len(found.numbers) and max(distances, default=0.0) > bound:
            place = next(number for number, distance in enumerate(distances) if distance > bound)
            old, new = expected.values()[place], found.values()[place]
            digits = 6 if f"{new:.6g}" != f"{old:.6g}" else 12
            text = f"{'root mean square ' * (expected.rows > 0 and place)}{new:.{digits}g} instead of {old:.{digits}g}"
            factor = new / old if old else None
            difference = EvaluationDifference(name, text + _of_ranks(after), found.line, False, is_alone, factor)
            yield difference, _may_differ(name, distances, bound)


def own_values(run: Sequence[Evaluation]) -> Iterator[tuple[str, int]]:
    """Yield the names, with lines, of numbers that each rank logged or printed another value of."""
    first = run[0].shown if run else {}
    for name, shown in first.items():
        if any(name in each.shown and distance(shown, each.shown[name]) > 0 for each in run[1:]):
            yield name, shown.line


def _mean(ranks: Sequence[Shown]) -> Shown:
    """Return the mean over the ranks, or the first rank's numbers where all are equal."""
    first = ranks[0]
    shown = [each.numbers for each in ranks]
    if first.rows or len(set(map(len, shown))) > 1 or all(numbers == shown[0] for numbers in shown):
        return first
    means = [sum(number for number, _ in each) / len(each) for each in zip(*shown, strict=True)]
    return Shown(first.line, numbers=[[mean, unit] for mean, (_, unit) in zip(means, shown[0], strict=True)])


def _of_ranks(ranks: Sequence[Shown]) -> str:
    """Return the end of a sentence about ranks that show different values; "" if they don't."""
    if ranks[0].rows or all(distance(ranks[0], each) == 0 for each in ranks[1:]):
        return ""
    return " (the mean: each process shows a value of its own samples)"
