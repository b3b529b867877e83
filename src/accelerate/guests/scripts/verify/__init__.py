"""Compare a script with its conversion, and one process with two, by training some steps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .runs import ORIGINAL, Comparison, Run, Runs, VerificationError, title_of

if TYPE_CHECKING:
    from ..migrate import Migration
    from .record import Record


def verify(found: Migration, script: Path, arguments: Sequence[str], num_steps: int) -> list[Comparison]:
    """Train with the script and with its conversion, and return the comparison.

    A script for one device runs on one process; its conversion runs on one, and on two that share each batch. A script
    with hand-written distributed training runs on as many processes as its conversion. All runs use the CPU, without
    dropout.

    Raises:
        VerificationError: one of the runs failed, or didn't train.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as name:
        runs = Runs(Path(name), script, list(arguments), num_steps)
        converted = runs.folder / script.name
        converted.write_bytes(found.after.encode("utf-8"))
        if found.is_spawning:
            original = runs.observe(ORIGINAL, script, splits=False)
            ranks = len(original)
            return [_compared(original, runs.observe(title_of(ranks), converted, ranks, splits=False))]
        if found.is_by_hand:
            return [
                _compared(
                    runs.observe(ORIGINAL, script, ranks, splits=False, by_hand=True),
                    runs.observe(title_of(ranks), converted, ranks, splits=False),
                )
                for ranks in (1, 2)
            ]
        original = runs.observe(ORIGINAL, script)
        return [_compared(original, *(runs.observe(title_of(n), converted, n) for n in (1, 2)), differs=found.differs)]


def compare_ranks(script: Path, arguments: Sequence[str], num_steps: int) -> Comparison:
    """Train an accelerated script on one process and on two with shared batches; return the comparison.

    Raises:
        VerificationError: one of the runs failed, or didn't train.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate_verify_") as name:
        runs = Runs(Path(name), script, list(arguments), num_steps)
        one, two = (runs.observe(title_of(ranks), script, ranks) for ranks in (1, 2))
        return _compared(one, two, title=title_of(1))


def _compared(
    first: Sequence[Record], *others: Sequence[Record], title: str = ORIGINAL, differs: Sequence[str] = ()
) -> Comparison:
    before = Run.of(title, first)
    runs = [Run.of(title_of(len(records)), records) for records in others]
    excused: dict[str, str] = {}
    for run, records in zip(runs, others, strict=True):
        if len(records) == len(first):
            continue
        if run.normalizes:
            excused[run.title] = "a layer normalises over the batch of its process (BatchNorm), which is smaller"
        elif differs:
            excused[run.title] = "; ".join(differs)
        elif run.draws:
            excused[run.title] = "the loop draws random numbers, and each process draws its own"
    return Comparison([before, *runs], excused)


__all__ = ["Comparison", "Run", "VerificationError", "compare_ranks", "verify"]
