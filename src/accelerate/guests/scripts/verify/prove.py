"""Run a script as one process and in layouts, and compare them update by update."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, final

from .findings import BASES, Bounds, Finding, History, excesses_of, first_difference, notes_on
from .layouts import Layout, accumulating
from .record import Conditions, Record
from .runs import LayoutRefused, Runs, VerificationError

#: A batch of as many samples can be shared by four processes, or cut into four parts.
_MULTIPLE: Final = 4

#: Sums of float64 in another order change the first gradients by less.
_ROUNDED: Final = 1e-12
_COUNTS_UPDATES: Final = (
    "the learning rate agrees if the lengths of loaders are in updates. The script counts micro-batches by an option "
    "of its own, which this layout doesn't set."
)
#: The rounding unit of bfloat16. Another order of sums alone doesn't change what is rounded before it is summed.
_NOISE: Final = 2.0**-9


@final
@dataclass(frozen=True)
class Outcome:
    """The result of one layout.

    Attributes:
        state: "agrees", "differs", "skipped" or "failed".
        why: the reason of a skipped or failed layout.
        excesses: for gradients, weights and states, the largest difference of each update over its bound.
    """

    layout: Layout
    state: str
    why: str = ""
    finding: Finding | None = None
    seconds: float = 0.0
    excesses: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@final
@dataclass(frozen=True)
class Proof:
    """The outcomes of all layouts.

    Attributes:
        dtype: the dtype that all runs computed in.
        num_updates: the number of updates of the reference.
        notes: what was left out of the comparison, and why.
        same_bits: all bits were compared.
    """

    script: Path
    dtype: str
    num_updates: int
    outcomes: list[Outcome]
    notes: list[str] = field(default_factory=list[str])
    same_bits: bool = False

    @property
    def exit_code(self) -> int:
        """0: all layouts that could be run agree; 1: one differs; 2: none could be run, or one failed."""
        states = [outcome.state for outcome in self.outcomes]
        if "differs" in states:
            return 1
        return 2 if "failed" in states or "agrees" not in states else 0


def prove(
    script: Path,
    arguments: Sequence[str],
    num_steps: int,
    layouts: Iterable[Layout],
    dtype: str | None = None,
    *,
    same_bits: bool = False,
) -> Proof:
    """Train with `script` as one process and in `layouts`, and return what differs.

    Args:
        dtype: the dtype to compute in; None means float64 where the script allows it, else its own.
        same_bits: compute each update in parts of one batch, in all runs, and compare all bits.

    Raises:
        VerificationError: the script doesn't run as one process.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as name:
        runs = Runs(Path(name), script, list(arguments), num_steps)
        return _Prover(runs, dtype, same_bits=same_bits).prove(layouts)


@final
class _Reference(NamedTuple):
    """A run as one process, with which layouts are compared."""

    record: Record
    history: History
    bounds: Bounds
    dtype: str


@final
class _Prover:
    def __init__(self, runs: Runs, dtype: str | None, *, same_bits: bool = False) -> None:
        self._runs = runs
        self._notes: list[str] = []
        self._references: dict[str, _Reference] = {}
        self._conditions = Conditions(
            runs.num_steps, splits_batches=True, multiple=_MULTIPLE, dtype=dtype or "float64", keeps_tensors=True
        )
        self._same_bits = same_bits
        if same_bits:  # a share of a batch is a part
            self._conditions = replace(self._conditions, batch_parts=_MULTIPLE, num_shares=_MULTIPLE)
        self._conditions = self._conditions.for_first_run(runs.script)
        self._may_fall_back = dtype is None
        text = runs.script.read_text(encoding="utf-8", errors="replace")
        self._is_by_hand = "init_process_group" in text and "Accelerator" not in text

    def prove(self, layouts: Iterable[Layout]) -> Proof:
        reference = self._reference("")
        outcomes = [self._outcome(layout, reference.record) for layout in layouts]
        num_updates = len(reference.history.steps)
        return Proof(self._runs.script, reference.dtype, num_updates, outcomes, self._notes, self._same_bits)

    def _reference(self, precision: str) -> _Reference:
        """Return the run of one process, in a mixed precision or without; it runs once."""
        if precision not in self._references:
            records = self._run("1 process", self._conditions_of(precision)) if precision else self._first_runs()
            conditions = self._conditions_of(precision)
            dtype = conditions.dtype or ("bfloat16" if records[0].is_rounded else "float32")
            history, bounds = History.of(records), Bounds(0.0)
            if not self._same_bits:
                dtype, bounds = self._bounds(history, dtype, conditions)
            self._references[precision] = _Reference(records[0], history, bounds, dtype)
        return self._references[precision]

    def _bounds(self, history: History, dtype: str, conditions: Conditions) -> tuple[str, Bounds]:
        """Run the reference with its sums in another order; return the dtype that it computes in, and the bounds."""
        other = replace(conditions, reorders=True, noise=_NOISE if conditions.mixed_precision else 0.0)
        reordered = History.of(self._run("sums in another order", other))
        bounds = Bounds.of(BASES.get(dtype, BASES["float32"]), history, reordered)
        if dtype == "float64" and bounds.first_spread() > _ROUNDED:
            self._notes.append("Parts of the script compute in float32, so differences may hide in rounding.")
            return "float32", Bounds.of(BASES["float32"], history, reordered)
        return dtype, bounds

    def _conditions_of(self, precision: str) -> Conditions:
        return replace(self._conditions, dtype="", mixed_precision=precision) if precision else self._conditions

    def _first_runs(self) -> list[Record]:
        """Run as one process; run again with whole evaluations if the script evaluates."""
        found = self._first_run()
        self._conditions = self._conditions.after(found[0])
        if found[0].failure and not self._conditions.evaluation_seconds:
            self._notes.append(f"The evaluation after the last update isn't compared: {found[0].failure}.")
        return self._run("1 process", self._conditions) if self._conditions.evaluated else found

    def _first_run(self) -> list[Record]:
        try:
            return self._run("1 process", self._conditions)
        except VerificationError as error:
            if self._same_bits and isinstance(error, LayoutRefused):
                raise VerificationError(f"{self._runs.script}: {error.reason}") from None
            if not self._may_fall_back:
                raise
            self._conditions = replace(self._conditions, dtype="")
            try:
                found = self._run("1 process", self._conditions)
            except VerificationError:
                raise error from None
            self._notes.append("The script can't compute in float64, so differences may hide in rounding.")
            return found

    def _run(self, title: str, conditions: Conditions, layout: Layout | None = None, ranks: int = 0) -> list[Record]:
        ranks = ranks or (1 if layout is None else layout.ranks)
        if self._is_by_hand:
            conditions = replace(conditions, num_shares=ranks)
        flags = () if layout is None else layout.flags
        return self._runs.observe_under(conditions, title, self._runs.script, ranks, flags, by_hand=self._is_by_hand)

    def _outcome(self, layout: Layout, first: Record) -> Outcome:
        why = layout.needs(first) or (accumulating(first) if self._same_bits else "")
        if not why and layout.ranks > 1 and not {"Accelerator", "group"} & set(first.uses):
            why = "the script, started as one process, makes no Accelerator and no process group"
        if not why and layout.ranks * layout.num_parts > 1 and first.draws and not self._same_bits:
            why = "the loop draws random numbers, and others for other parts of a batch"
        if why:
            return Outcome(layout, "skipped", why)
        began = time.monotonic()
        try:
            reference = self._reference(layout.precision)
            run, finding = self._compared(layout, reference, {})
            for changes in () if self._same_bits else _retries(layout, finding):
                other, found = self._compared(layout, reference, changes)
                if finding is not None and (found is None or found.code != finding.code):
                    run, finding = other, found
                if finding is None:
                    if changes.get("counts_updates"):
                        self._notes.append(f"{layout.name}: {_COUNTS_UPDATES}")
                    break
        except LayoutRefused as error:
            return Outcome(layout, "skipped", error.reason.splitlines()[0])
        except VerificationError as error:
            return Outcome(layout, "failed", str(error), seconds=time.monotonic() - began)
        if finding is None:
            self._notes += notes_on(layout, reference.history, run, reference.bounds, self._runs.script)
        state = "agrees" if finding is None else "differs"
        excesses = excesses_of(layout, reference.history, run, reference.bounds)
        return Outcome(layout, state, finding=finding, seconds=time.monotonic() - began, excesses=excesses)

    def _compared(
        self, layout: Layout, reference: _Reference, changes: dict[str, int]
    ) -> tuple[History, Finding | None]:
        run = self._history(layout, len(reference.history.steps), changes)
        return run, first_difference(layout, reference.history, run, reference.bounds)

    def _history(self, layout: Layout, num_steps: int, changes: dict[str, int]) -> History:
        conditions = replace(
            self._conditions_of(layout.precision),
            num_parts=layout.num_parts,
            recomputes=layout.recomputes,
            num_steps=num_steps,
            mesh=dict(layout.mesh),
            shards="--use_fsdp" in layout.flags,
            **changes,
        )
        if not layout.resumes:
            return History.of(self._run(layout.name, conditions, layout))
        runs: list[list[Record]] = []
        resumes = min(layout.resumes, max(num_steps - 1, 1))
        each = max(num_steps // (resumes + 1), 1)
        saved, taken, is_last = "", 0, False
        for number in range(resumes + 1):
            is_last = number == resumes
            folder = str(self._runs.folder / f"{layout.name}_{number}")
            part = replace(
                conditions,
                num_steps=num_steps - taken,
                saves_at=0 if is_last else each,
                save_to=folder,
                resumes_from=saved,
            )
            ranks = layout.resumed_ranks if number and layout.resumed_ranks else layout.ranks
            if ranks != layout.ranks and not self._same_bits:
                part = replace(part, num_shares=1, divides_itself=False)
            runs.append(self._run(f"{layout.name}, part {number + 1}", part, layout, ranks))
            taken += len(runs[-1][0].steps)
            if not is_last and (taken >= num_steps or not Path(folder).exists()):
                break
            saved = folder
        if len(runs) == 1:
            why = f"no batch of the outermost loop over a prepared loader ended between updates {each} and {num_steps}"
            raise LayoutRefused(f"{self._runs.script}: {why}", why)
        return replace(History.of(*runs), ends_saving=not is_last)


def _retries(layout: Layout, finding: Finding | None) -> list[dict[str, int]]:
    """Return other conditions under which a script may agree, because it was written for them.

    Its schedule may be made for loaders that don't split batches, whose schedulers step once for each process, or have
    a length in updates. It may divide the data set, or its batch size, by the number of processes itself.
    """
    shares: list[dict[str, int]] = [{"num_shares": layout.num_shares}] if layout.num_shares > 1 else []
    if finding is None or finding.code not in ("V01", "V07"):
        return []
    if finding.code == "V01":
        return [*shares, *({**one, "divides_itself": True} for one in shares)]
    updates: list[dict[str, int]] = [{"counts_updates": True}] if layout.num_parts > 1 else []
    return [*shares, *updates, *({**one, **other} for one in shares for other in updates)]
