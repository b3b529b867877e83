"""What was compared, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .prove import Outcome, Proof


def as_text(proof: Proof) -> str:
    """Return a table of the layouts, and below it the first difference of each that differs."""
    rows = [(outcome.layout.name, outcome.layout.text, _result(outcome)) for outcome in proof.outcomes]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{proof.script}: {proof.num_updates} updates of one process in {proof.dtype}, and the same in layouts"]
    lines += [f"  {name:<{widths[0]}}  {text:<{widths[1]}}  {result}" for name, text, result in rows]
    for outcome in proof.outcomes:
        found = outcome.finding
        if found is not None:
            subject = f"{found.quantity} of {found.name}" if found.name else found.quantity
            lines += ["", f"{found.layout}: update {found.update}, {subject}: {found.text} [{found.code}]"]
            if found.lines[0]:
                backward = f", backward pass at line {found.lines[1]}" if found.lines[1] else ""
                lines.append(f"  {proof.script}:{found.lines[0]}: the step{backward}")
        elif outcome.state == "failed":
            lines += ["", f"{outcome.layout.name}: {outcome.why}"]
    lines += [f"Note: {note}" for note in proof.notes]
    return "\n".join(lines)


def _result(outcome: Outcome) -> str:
    if outcome.state == "skipped":
        return f"skipped: {outcome.why}"
    return f"{outcome.state} ({outcome.seconds:.0f} s)"


def as_json(proof: Proof) -> dict[str, Any]:
    """Return what was compared as values of JSON."""
    return {
        "script": str(proof.script),
        "dtype": proof.dtype,
        "updates": proof.num_updates,
        "exit_code": proof.exit_code,
        "notes": proof.notes,
        "layouts": [
            {
                "name": outcome.layout.name,
                "state": outcome.state,
                "why": outcome.why,
                "seconds": round(outcome.seconds, 2),
                "finding": None if outcome.finding is None else asdict(outcome.finding),
            }
            for outcome in proof.outcomes
        ],
    }
