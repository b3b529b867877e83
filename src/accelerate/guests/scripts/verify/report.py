"""What was compared, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .prove import Outcome, Proof


def as_text(proof: Proof) -> str:
    """Return a table of the layouts, and below it the first difference of each that differs."""
    rows = [(outcome.layout.name, outcome.layout.text, result_text(outcome)) for outcome in proof.outcomes]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{proof.script}: {title_of(proof)}"]
    lines += [f"  {name:<{widths[0]}}  {text:<{widths[1]}}  {result}" for name, text, result in rows]
    for outcome in proof.outcomes:
        if outcome.state in ("differs", "failed"):
            lines += ["", finding_text(proof, outcome)]
    lines += [f"Note: {note}" for note in proof.notes]
    return "\n".join(lines)


def title_of(proof: Proof) -> str:
    """Return what was compared, as a sentence without a full stop."""
    how = ", compared by every bit" if proof.same_bits else ""
    return f"{proof.num_updates} updates of one process in {proof.dtype}, and the same in layouts{how}"


def finding_text(proof: Proof, outcome: Outcome) -> str:
    """Return the first difference of a layout, or why it couldn't be run, as lines of text."""
    found = outcome.finding
    if found is None:
        return f"{outcome.layout.name}: {outcome.why}"
    subject = f"{found.quantity} of {found.name}" if found.name else found.quantity
    if found.quantity == "evaluation":
        subject = f"evaluation, {found.name}" if found.name else found.quantity
        text = f"{found.layout}: after update {found.update}, {subject}: {found.text} [{found.code}]"
        return text + (f"\n  {proof.script}:{found.lines[0]}" if found.lines[0] else "")
    text = f"{found.layout}: update {found.update}, {subject}: {found.text} [{found.code}]"
    if found.lines[0]:
        backward = f", backward pass at line {found.lines[1]}" if found.lines[1] else ""
        text += f"\n  {proof.script}:{found.lines[0]}: the step{backward}"
    return text


def result_text(outcome: Outcome) -> str:
    """Return the state of a layout with its time, or the reason why it was skipped."""
    return f"skipped: {outcome.why}" if outcome.state == "skipped" else f"{outcome.state} ({outcome.seconds:.0f} s)"


def as_json(proof: Proof) -> dict[str, Any]:
    """Return what was compared as values of JSON."""
    return {
        "script": str(proof.script),
        "dtype": proof.dtype,
        "same_bits": proof.same_bits,
        "updates": proof.num_updates,
        "exit_code": proof.exit_code,
        "notes": proof.notes,
        "layouts": [
            {
                "name": outcome.layout.name,
                "state": outcome.state,
                "why": outcome.why,
                "seconds": round(outcome.seconds, 2),
                "excesses": {kind: list(map(_finite, values)) for kind, values in outcome.excesses.items()},
                "finding": None if outcome.finding is None else asdict(outcome.finding),
            }
            for outcome in proof.outcomes
        ],
    }


def _finite(value: float) -> float | None:
    """Return the value, or None for one that JSON doesn't have."""
    return value if math.isfinite(value) else None
