"""What was compared, as text, as JSON, and as a page of HTML."""

from __future__ import annotations

import html
import math
from dataclasses import asdict
from typing import Any, Final

from .findings import QUANTITIES
from .prove import Outcome, Proof

#: Of the curves in the page.
_WIDTH: Final = 560
_HEIGHT: Final = 160
_MARGIN: Final = 56
_COLOURS: Final = {"gradients": "#1f6feb", "weights": "#1a7f37", "states": "#9a6700"}
#: The range of the vertical axis: powers of ten of a difference over its bound.
_LOWEST, _HIGHEST = -6.0, 12.0

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328}"
    "table{border-collapse:collapse}td,th{padding:.3rem .8rem;border-bottom:1px solid #d0d7de;text-align:left}"
    ".differs,.failed{color:#b42318;font-weight:600}.agrees{color:#1a7f37}.skipped{color:#656d76}"
    "pre{background:#f6f8fa;padding:.8rem;white-space:pre-wrap}svg{max-width:100%;height:auto}"
    "text{font:12px system-ui,sans-serif;fill:#656d76}"
)


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


def as_html(proof: Proof) -> str:
    """Return a page: a table, the first differences, and how differences grew."""
    title = html.escape(f"accelerate verify {proof.script}")
    rows = "".join(
        f"<tr><td><code>{html.escape(outcome.layout.name)}</code></td><td>{html.escape(outcome.layout.text)}</td>"
        f'<td class="{outcome.state}">{html.escape(result_text(outcome))}</td></tr>'
        for outcome in proof.outcomes
    )
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1><p>{title_of(proof)}.</p>",
        f"<table><tr><th>layout</th><th>run</th><th>result</th></tr>{rows}</table>",
    ]
    parts += [f"<p>{html.escape(note)}</p>" for note in proof.notes]
    differing = [outcome for outcome in proof.outcomes if outcome.state in ("differs", "failed")]
    if differing:
        parts.append("<h2>First differences</h2>")
        parts += [f"<pre>{html.escape(finding_text(proof, outcome))}</pre>" for outcome in differing]
    drawn = [outcome for outcome in proof.outcomes if outcome.excesses and not proof.same_bits]
    if drawn:
        parts.append(
            "<h2>Differences by update</h2><p>The largest difference of an update over its bound, on a scale of powers "
            "of ten. Above the line at 1, a layout differs.</p>"
        )
        parts += [f"<h3>{html.escape(outcome.layout.name)}</h3>{_curves(outcome)}" for outcome in drawn]
    return "".join(parts) + "</html>\n"


def _curves(outcome: Outcome) -> str:
    """Return the curves of one layout as SVG."""
    count = max(map(len, outcome.excesses.values()))
    lines = [
        f'<line x1="{_MARGIN}" x2="{_WIDTH}" y1="{_y(1.0):.1f}" y2="{_y(1.0):.1f}" stroke="#b42318" '
        f'stroke-dasharray="4"/><text x="{_MARGIN - 6}" y="{_y(1.0) + 4:.1f}" text-anchor="end">1</text>'
    ]
    for power in (_LOWEST, _HIGHEST):
        lines.append(f'<text x="{_MARGIN - 6}" y="{_y(10.0**power) + 4:.1f}" text-anchor="end">1e{power:.0f}</text>')
    for number in range(count):
        x = _x(number, count)
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{number + 1}</text>')
    for place, (kind, values) in enumerate(outcome.excesses.items()):
        places = [(_x(number, count), _y(value)) for number, value in enumerate(values)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = _COLOURS[kind]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        lines.append(
            f'<text x="{_MARGIN + 130 * place}" y="{_HEIGHT + 32}" style="fill:{colour}">&#9679; '
            f"{QUANTITIES[kind]}s</text>"
        )
    return f'<svg viewBox="0 0 {_WIDTH + 10} {_HEIGHT + 40}" width="{_WIDTH + 10}">{"".join(lines)}</svg>'


def _x(number: int, count: int) -> float:
    return _MARGIN + 14 + number * (_WIDTH - _MARGIN - 14) / max(count - 1, 1)


def _y(value: float) -> float:
    power = _HIGHEST if math.isinf(value) else math.log10(max(value, 10.0**_LOWEST))
    share = (min(max(power, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return 6 + (1 - share) * (_HEIGHT - 12)
