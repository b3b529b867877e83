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
#: How the names of reduced and of logged values begin.
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
    """

    name: str
    text: str
    line: int
    are_rows: bool = False
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
    values, others, largest = one.values(), other.values(), 0.0
    for place, (before, after) in enumerate(zip(values, others, strict=False)):
        if before == after or (math.isnan(before) and math.isnan(after)):
            continue
        scale = max(abs(values[-1]), abs(others[-1])) if one.rows else max(abs(before), abs(after))
        apart = max(abs(before - after) - 1.01 * one.numbers[place][1], 0.0) / max(scale, _LEAST)
        largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest


def differences(
    reference: Sequence[Evaluation],
    run: Sequence[Evaluation],
    bound_of: Callable[[str], float | None],
) -> Iterator[EvaluationDifference]:
    """Yield the differences of an evaluation from the reference's, each given by rank.

    A value that each rank computed from its own samples counts as its mean over the ranks. What only some ranks of
    the run showed isn't compared, unless it is so in the reference too.

    Args:
        bound_of: returns the largest relative difference for a name; None if it isn't compared.
    """
    if any(each.draws for each in (*reference, *run)):
        return
    found = {each.name: each for each in _differences(reference, run, bound_of)}
    for name, difference in found.items():
        if not name.startswith(REDUCED) or not _agrees_later(name, reference[0].shown, found):
            yield difference


def _agrees_later(name: str, shown: Mapping[str, Shown], found: Container[str]) -> bool:
    """Return whether results are logged or printed after a reduced value, and all agree.

    A sum over micro-batches differs with their number; what a script shows of it need not.
    """
    later = dropwhile(lambda each: each != name, shown)
    results = [each for each in later if _is_result(each, shown[each])]
    return bool(results) and not any(each in found for each in results)


def _is_result(name: str, shown: Shown) -> bool:
    """Return whether numbers are logged, or printed with decimals: a whole number may be that of the epoch."""
    return name.startswith(LOGGED) or any(rounding for _, rounding in shown.numbers)


def _differences(
    reference: Sequence[Evaluation], run: Sequence[Evaluation], bound_of: Callable[[str], float | None]
) -> Iterator[EvaluationDifference]:
    for name in dict.fromkeys(name for each in reference for name in each.shown):
        before, after = ([each.shown[name] for each in ranks if name in each.shown] for ranks in (reference, run))
        if not after or (len(after) < len(run) and (len(before), len(reference)) != (len(after), len(run))):
            continue
        expected, found = _mean(before), _mean(after)
        # One row of each rank with all its samples is another shape of the same values.
        has_all_values = found.num_values == expected.num_values
        if expected.rows and found.rows % expected.rows and not has_all_values:  # a value of each rank gives more
            text = f"{found.rows} rows instead of {expected.rows}"
            yield EvaluationDifference(name, text, found.line, are_rows=True, factor=found.rows / expected.rows)
            continue
        bound = bound_of(name)
        if bound is not None and len(expected.numbers) == len(found.numbers) and distance(expected, found) > bound:
            pairs = zip(expected.values(), found.values(), strict=True)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            text = f"{new:.6g} instead of {old:.6g}"
            yield EvaluationDifference(name, text + _of_ranks(after), found.line, factor=new / old if old else None)


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
