"""The first difference of a layout from the reference, with its likely cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, final

from . import evaluations
from .evaluations import Evaluation, EvaluationDifference
from .layouts import Layout
from .record import Moments, Record, Step

#: The bound of a relative difference without rounding to speak of, by the dtype that is computed in.
BASES: Final = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
#: How many times the spread of the reference a difference may be.
SPREADS: Final = 20.0
#: Above this bound, or five times the base where that is larger, a comparison says nothing.
MEANINGFUL: Final = 1e-2
#: The share of the norm of all tensors that counts as the least norm of one.
_LEAST: Final = 1e-3
#: A smaller relative difference may be rounding, in any dtype but those of 16 bits.
_ROUNDING: Final = 1e-5

#: The kinds of tensors, and what one of each is called.
QUANTITIES: Final = {"gradients": "gradient", "weights": "parameter", "states": "optimizer state"}

#: What a finding's code stands for.
CODES: Final = {
    "V01": "The samples of an update differ: some are read twice, or by no rank.",
    "V02": "Gradients differ by a factor of the number of ranks: summed instead of averaged, or the other way round.",
    "V03": "Gradients are a multiple of the reference's by the number of micro-batches: not divided by it, or twice.",
    "V04": "A parameter gets a gradient in one run and none in the other.",
    "V05": "Ranks that hold copies of one parameter have different values: their gradients are not averaged.",
    "V06": "The gradient norm that clips differs, and the gradients do not.",
    "V07": "The learning rate differs: the schedule counts micro-batches, or a rank's batches, instead of updates.",
    "V08": "Parameters differ after a step, and their gradients do not.",
    "V09": "A tensor has another dtype.",
    "V10": "The state of an optimizer differs, and the parameters do not.",
    "V11": "A layer normalises over the batch of its process, which is smaller.",
    "V12": "The number of updates differs.",
    "V13": "Gradients differ by no common factor.",
    "V14": "A resumed run differs from one without a stop: a state isn't saved, or isn't restored.",
    "V15": "Ranks exchange gradients in each micro-batch, so accumulation saves no communication.",
    "V16": "An evaluation counts another number of rows: padding or copies are counted, or samples are left out.",
    "V17": "A number of an evaluation differs: it isn't that of all samples, or (resumed) its state isn't saved.",
    "V18": "The evaluation fails in this layout, or doesn't end.",
    "V19": "Values agree up to rounding, and their bits differ: a rank adds a value of its own, or in another order.",
}


@final
@dataclass(frozen=True)
class Finding:
    """The first difference of a layout from the reference.

    Attributes:
        update: the number of the step, from 1.
        factor: by which the value is a multiple of the reference's; None if there is no such number.
        lines: of the script, the last step and the last backward pass; 0 if unknown.
    """

    layout: str
    update: int
    quantity: str
    name: str
    code: str
    text: str
    factor: float | None = None
    lines: tuple[int, int] = (0, 0)


@final
class Value(NamedTuple):
    """A tensor of a run, put together from its ranks."""

    moments: Moments | None
    differs: bool  # between ranks that hold copies


def together(parts: Sequence[Moments | None]) -> Value:
    """Return the whole of which each rank has a part, or a copy."""
    held = [part for part in parts if part is not None]
    if not held:
        return Value(None, differs=False)
    if all(part.held == part.size for part in held):
        first = held[0]
        differs = any(distance(first, other, first.norm) > 1e-12 or other.bits != first.bits for other in held[1:])
        return Value(first, differs or len(held) != len(parts))
    total = reduce(Moments.plus, held)
    return Value(total.divided(max(total.held, 1) / max(total.size, 1)), differs=False)


def distance(one: Moments, other: Moments, scale: float) -> float:
    """Return an estimate of the norm of the difference of two tensors, relative to `scale` or to their own."""
    change = (one.total - other.total) / math.sqrt(max(one.size, 1))
    changes = (one.norm - other.norm, one.projection - other.projection, change)
    if not all(map(math.isfinite, changes)):
        return 0.0 if repr(one[2:5]) == repr(other[2:5]) else math.inf
    return max(map(abs, changes)) / (max(one.norm, other.norm, scale) or 1.0)


@final
@dataclass
class History:
    """The steps of a run, put together from its ranks.

    Attributes:
        steps: the steps of each rank.
        shares: which share of the data each rank read, for each step.
        parts: the number of the part of a stopped and resumed run, for each step.
        ends_saving: the run was stopped after the last step, so it has no evaluation after it.
    """

    steps: list[Sequence[Step]]
    shares: list[list[int]]
    parts: list[int]
    records: Sequence[Record]
    ends_saving: bool = False

    @classmethod
    def of(cls, *runs: Sequence[Record]) -> History:
        """Return the history of a run, or of one that was stopped and resumed."""
        found = cls([], [], [], runs[-1])
        for part, records in enumerate(runs):
            steps = list(zip(*(record.steps for record in records), strict=False))
            found.steps += steps
            found.shares += [[record.share for record in records]] * len(steps)
            found.parts += [part] * len(steps)
        return found

    def evaluations(self, num_steps: int) -> list[Evaluation]:
        """Return each rank's evaluation after so many steps, of the last part of the run."""
        before = len(self.steps) - len(self.records[0].steps)
        found = (each for record in self.records for each in record.evaluations if each.shown)
        return [each for each in found if before + each.num_steps == num_steps]

    def tensors(self, number: int, kind: str) -> dict[str, Value]:
        """Return the gradients, weights or states of step `number`."""
        each: list[Mapping[str, Moments | None]] = [getattr(step, kind) for step in self.steps[number]]
        names = dict.fromkeys(name for one in each for name in one)
        return {name: together([one[name] for one in each if name in one]) for name in names}

    def samples(self, number: int) -> Counter[int]:
        """Return how often each sample is part of step `number`, over all shares of the data."""
        readers = dict(zip(self.shares[number], self.steps[number], strict=True))
        return Counter(index for step in readers.values() for batch in step.samples for index in batch)


@final
@dataclass
class Bounds:
    """The bounds of differences: a constant, or a multiple of what another order of sums changes in the reference.

    What changed in a tensor is seen by three sums, which may miss it by chance: the median of all tensors counts too.
    A base of 0 compares all bits.
    """

    base: float
    spread: dict[tuple[int, str, str], float] = field(default_factory=dict[tuple[int, str, str], float])
    medians: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])

    @classmethod
    def of(cls, base: float, reference: History, reordered: History) -> Bounds:
        """Return the bounds from two runs of the reference, one of them with its sums in another order."""
        found = cls(base)
        for number, (steps, others) in enumerate(zip(reference.steps, reordered.steps, strict=False)):
            norm, other = steps[0].norm, others[0].norm
            if norm and other is not None:
                found.spread[number, "norm", ""] = abs(norm - other) / abs(norm)
        for number in range(len(reference.steps) + 1):
            for before in reference.evaluations(number):
                for after in reordered.evaluations(number):
                    for name in before.shown.keys() & after.shown.keys():
                        change = evaluations.distance(before.shown[name], after.shown[name])
                        found.spread[number, "evaluation", name] = change
        for kind in QUANTITIES:
            largest: dict[str, float] = {}
            for number in range(min(len(reference.steps), len(reordered.steps))):
                before = reference.tensors(number, kind)
                scale = _scale(before)
                for name, one, other in _pairs(before, reordered.tensors(number, kind)):
                    largest[name] = max(largest.get(name, 0.0), distance(one, other, scale))
                found.spread |= {(number, kind, name): largest.get(name, 0.0) for name in before}
                found.medians[number, kind] = median(largest.values()) if largest else 0.0
        return found

    def bound(self, number: int, kind: str, name: str) -> float:
        """Return the largest difference that rounding explains."""
        spread = max(self.spread.get((number, kind, name), 0.0), self.medians.get((number, kind), 0.0))
        return max(self.base, SPREADS * spread)

    def excess(self, number: int, kind: str, name: str, before: Moments, after: Moments, scale: float) -> float:
        """Return how many times the bound two tensors differ."""
        if not self.base:
            return 0.0 if before.bits == after.bits else math.inf
        return distance(before, after, scale) / self.bound(number, kind, name)

    def first_spread(self) -> float:
        """Return the largest change of a gradient in the first update."""
        found = [value for (number, kind, _), value in self.spread.items() if (number, kind) == (0, "gradients")]
        return max(found, default=0.0)

    def is_meaningful(self, bound: float) -> bool:
        """Return whether a comparison with this bound says anything."""
        return bound <= max(MEANINGFUL, 5 * self.base)


def _pairs(before: Mapping[str, Value], after: Mapping[str, Value]) -> Iterator[tuple[str, Moments, Moments]]:
    """Yield the names of the tensors that both have, with their moments."""
    for name, value in before.items():
        other = after[name].moments if name in after else None
        if value.moments is not None and other is not None:
            yield name, value.moments, other


def _scale(tensors: Mapping[str, Value]) -> float:
    """Return the norm below which a tensor counts as small beside the others."""
    return _LEAST * math.sqrt(sum(value.moments.square for value in tensors.values() if value.moments is not None))


def first_difference(layout: Layout, reference: History, run: History, bounds: Bounds) -> Finding | None:
    """Return the first difference of a run from the reference; None if there is none."""
    for number in range(min(len(reference.steps), len(run.steps))):
        for found in _StepComparison(layout, reference, run, bounds, number).differences():
            return found
    if len(run.steps) != len(reference.steps):
        text = f"{len(run.steps)} updates instead of {len(reference.steps)}"
        return Finding(layout.name, len(run.steps) + 1, "updates", "", "V12", text)
    return next(_of_evaluations(layout, reference, run, bounds), None)


def _evaluation_differences(
    layout: Layout, reference: History, run: History, bounds: Bounds
) -> Iterator[tuple[int, EvaluationDifference]]:
    """Yield the differences of evaluations with their steps; of a resumed run, of the one after the last step."""
    last = len(reference.steps)
    for number in range(last if layout.resumes else 0, last + 1):

        def bound_of(name: str, number: int = number) -> float | None:
            bound = bounds.bound(number, "evaluation", name)
            return bound if bounds.is_meaningful(bound) and not layout.precision else None

        found = evaluations.differences(reference.evaluations(number), run.evaluations(number), bound_of)
        yield from ((number, each) for each in found)


def _of_evaluations(layout: Layout, reference: History, run: History, bounds: Bounds) -> Iterator[Finding]:
    last = len(reference.steps)
    for number, each in _evaluation_differences(layout, reference, run, bounds):
        code = "V16" if each.are_rows else "V17"
        if not each.is_alone:
            yield Finding(layout.name, number, "evaluation", each.name, code, each.text, each.factor, (each.line, 0))
    failure = next((record.failure for record in run.records if record.failure), "")
    if failure and not reference.records[0].failure:
        yield Finding(layout.name, last, "evaluation", "", "V18", failure)
    elif reference.evaluations(last) and not run.evaluations(last) and not run.ends_saving:
        yield Finding(layout.name, last, "evaluation", "", "V16", "none, and one in the reference")


def notes_on(layout: Layout, reference: History, run: History, bounds: Bounds, script: Path) -> list[str]:
    """Return notes on numbers that are, or may be, those of a rank's own samples, in a run without a finding."""
    each = (run.evaluations(number) for number in range(len(run.steps) + 1))
    own = dict(found for ranks in each for found in evaluations.own_values(ranks))
    alone = {found.name: found for _, found in _evaluation_differences(layout, reference, run, bounds)}
    return [
        *(f"{layout.name}: each process shows its own value of {name} ({script}:{line}). The mean over the processes "
          "agrees." for name, line in own.items()),
        *(f"{layout.name}: only some processes show {name} ({script}:{one.line}), here {one.text}. It isn't a finding, "
          "because it may be of their own samples." for name, one in alone.items()),
    ]  # fmt: skip


def excesses_of(layout: Layout, reference: History, run: History, bounds: Bounds) -> dict[str, list[float]]:
    """Return the largest difference of each step over its bound, for each kind of tensors that both have."""
    found: dict[str, list[float]] = {}
    for kind in ("gradients",) if layout.precision else QUANTITIES:
        for number in range(min(len(reference.steps), len(run.steps))):
            before = reference.tensors(number, kind)
            excesses = [
                bounds.excess(number, kind, name, one, other, _scale(before))
                for name, one, other in _pairs(before, run.tensors(number, kind))
                if bounds.is_meaningful(bounds.bound(number, kind, name))
            ]
            if excesses:
                found.setdefault(kind, []).append(max(excesses))
    return found


@final
class _StepComparison:
    """The comparison of one step of a run with the reference's."""

    def __init__(self, layout: Layout, reference: History, run: History, bounds: Bounds, number: int) -> None:
        self._layout, self._reference, self._run, self._bounds, self._number = layout, reference, run, bounds, number

    def differences(self) -> Iterator[Finding]:
        """Yield the differences in the order in which one follows from another."""
        expected, found = self._reference.steps[self._number][0], self._run.steps[self._number][0]
        before, after = self._reference.samples(self._number), self._run.samples(self._number)
        if before and after and before != after:
            yield self._finding("samples", "", "V01", _samples_text(before, after, self._layout.num_parts))
        yield from self._of_tensors("gradients")
        if expected.norm is not None and found.norm is not None:
            scale = max(abs(expected.norm), abs(found.norm)) or 1.0
            if abs(expected.norm - found.norm) / scale > self._bounds.bound(self._number, "norm", ""):
                factor = found.norm / expected.norm if expected.norm else None
                text = f"{found.norm:.6g} instead of {expected.norm:.6g}"
                yield self._finding("gradient norm", "", "V06", text, factor)
        if not _are_equal(expected.rates, found.rates):
            ratio = found.rates[0] / expected.rates[0] if expected.rates and expected.rates[0] else None
            text = f"{_numbers(found.rates)} instead of {_numbers(expected.rates)}"
            code = "V14" if self._run.parts[self._number] else "V07"
            yield self._finding("learning rate", "", code, text, ratio)
        yield from self._of_tensors("weights")
        yield from self._of_tensors("states")
        if expected.fingerprint != found.fingerprint:
            yield self._finding("fingerprint", "", "V19", "a buffer, a schedule, a random stream or a position differs")
        num_batches = len(set(map(tuple, found.samples)))
        if 1 < num_batches <= found.num_reductions:
            text = f"{found.num_reductions} in an update of {num_batches} micro-batches: accumulation saves nothing"
            yield self._finding("exchange of gradients", "", "V15", text, float(found.num_reductions))

    def _finding(self, quantity: str, name: str, code: str, text: str, factor: float | None = None) -> Finding:
        step, backward = self._run.steps[self._number][0].place
        return Finding(self._layout.name, self._number + 1, quantity, name, code, text, factor, (step, backward))

    def _of_tensors(self, kind: str) -> Iterator[Finding]:
        """Yield the first difference in kind, else the largest in value, of the gradients, weights or states."""
        before, after = self._reference.tensors(self._number, kind), self._run.tensors(self._number, kind)
        if not after:
            return
        scale = _scale(before)
        largest: tuple[float, str, Moments, Moments] | None = None
        for name, value in before.items():
            other = after.get(name)
            if other is None and kind != "gradients":
                continue
            expected, found = value.moments, None if other is None else other.moments
            if expected is None or found is None:
                given = expected or found
                if given is not None and given.norm > 1e-6 * scale:  # else a gradient of zeros
                    text = "none, and one in the reference" if found is None else "one, and none in the reference"
                    yield self._finding(QUANTITIES[kind], name, "V04", text)
                    return
                continue
            bound = self._bounds.bound(self._number, kind, name)
            if kind != "gradients" and expected.dtype != found.dtype:
                yield self._finding(QUANTITIES[kind], name, "V09", f"{found.dtype} instead of {expected.dtype}")
                return
            if other is not None and other.differs and self._bounds.is_meaningful(bound):
                yield self._finding(QUANTITIES[kind], name, "V05", "its copies on the ranks differ")
                return
            if not self._bounds.is_meaningful(bound) or (self._layout.precision and kind != "gradients"):
                continue  # a gradient near zero, rounded to the other sign, makes another step of the whole rate
            excess = self._bounds.excess(self._number, kind, name, expected, found, scale)
            if excess > max(1.0, largest[0] if largest else 0.0):
                largest = excess, name, expected, found
        if largest is not None:
            _, name, expected, found = largest
            factor = _factor(expected, found)
            gap = distance(expected, found, scale)
            if not self._bounds.base and gap < _ROUNDING and not self._run.parts[self._number]:
                code, text, factor = "V19", f"its bits differ, by {gap:.1e} of its norm", None
            else:
                code, text = _cause(self._layout, self._run, self._number, kind, factor, expected, found)
            yield self._finding(QUANTITIES[kind], name, code, text + (self._hint() if code == "V13" else ""), factor)

    def _hint(self) -> str:
        """Return the likely cause of gradients that differ by no factor, as the end of a sentence; "" if unknown."""
        expected, found = self._reference.steps[self._number][0], self._run.steps[self._number][0]
        if found.num_clips > expected.num_clips:
            return (
                f": clipped {found.num_clips} times in this update, and {expected.num_clips} in the reference. "
                "Clip only where accelerator.sync_gradients is true"
            )
        copies = [name for name, value in self._run.tensors(self._number, "weights").items() if value.differs]
        return f": the copies of {copies[0]} on the ranks differ, so a rank changed it alone" if copies else ""


def _factor(before: Moments, after: Moments) -> float | None:
    """Return the number by which a tensor is a multiple of another; None if it is no multiple."""
    if not before.norm or not after.norm or not math.isfinite(after.norm):
        return None
    factor = after.norm / before.norm
    if before.projection * after.projection < 0:
        factor = -factor
    rest = abs(after.projection - factor * before.projection) + abs(after.total - factor * before.total)
    return factor if rest <= 1e-4 * (abs(after.projection) + abs(after.total) + after.norm) else None


def _cause(
    layout: Layout, run: History, number: int, kind: str, factor: float | None, before: Moments, after: Moments
) -> tuple[str, str]:
    by = f"norm {after.norm:.6g} instead of {before.norm:.6g}"
    if factor is not None:
        by = f"{factor:.4g} times the reference"
    if layout.ranks > 1 and run.records[0].normalizes:
        return "V11", f"{by}: {run.records[0].normalizes[0]} normalises over the samples of its process"
    if run.parts[number]:
        return "V14", f"{by}: it isn't saved, or isn't restored"
    if kind == "weights":
        return "V08", f"{by}, after equal gradients"
    if kind == "states":
        return "V10", f"{by}, after equal gradients and parameters"
    if factor is not None:
        for count, code, text, of in (
            (layout.ranks, "V02", "summed over the processes instead of averaged", "processes"),
            (layout.num_parts, "V03", "not divided by the number of micro-batches", "micro-batches"),
            (layout.ranks * layout.num_parts, "V02", "summed over all micro-batches of all processes", "all of these"),
        ):
            if count > 1 and math.isclose(factor, count, rel_tol=1e-3):
                return code, f"{by}: {text}"
            if count > 1 and math.isclose(factor, 1 / count, rel_tol=1e-3):
                return code, f"{by}: divided by the number of {of} once too often"
    return "V13", by


def _samples_text(before: Counter[int], after: Counter[int], num_parts: int) -> str:
    lost, added = sorted((before - after).elements()), sorted((after - before).elements())
    parts = [
        f"{len(found)} {word} ({', '.join(map(str, found[:6]))}{', ...' if len(found) > 6 else ''})"
        for found, word in ((lost, "lost"), (added, "added or read again"))
        if found
    ]
    steps_in_each_part = num_parts > 1 and not added and after.total() * num_parts == before.total()
    cause = ". The optimizer steps in each micro-batch. Pass it to accelerator.prepare()" if steps_in_each_part else ""
    return ", ".join(parts) + cause


def _are_equal(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in pairs)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
