"""The same run in a terminal: a few lines of numbers, the loss as a curve of dots, the ranks and the last events."""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, TextIO

from .reading import RunFiles
from .snapshot import snapshot

#: The eight dots of a braille character, by column and row.
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_SIGNS: Final = {
    "save": "✓", "load": "↺", "restart": "↻", "start": "▸", "stop": "■", "error": "✗", "non_finite": "✗",
    "warning": "▲", "epoch": "·", "end": "◂", "note": "•",
}  # fmt: skip
_NUM_EVENTS: Final = 8
_NUM_RANKS: Final = 16


def watch(run: RunFiles, output: TextIO, *, seconds: float = 1.0) -> None:
    """The run is on the terminal, drawn again every ``seconds``, until it is over or the user leaves."""
    output.write("\033[?1049h\033[?25l")  # a screen of its own, without a cursor
    try:
        while True:
            run.refresh()
            content = snapshot(run)
            size = shutil.get_terminal_size()
            lines = screen(content, size.columns, size.lines - 1)
            output.write("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J")
            output.flush()
            if content["state"] in ("finished", "failed", "stopped"):
                break
            time.sleep(seconds)
    finally:
        output.write("\033[?25h\033[?1049l")
        output.flush()
    print("\n".join(screen(snapshot(run), shutil.get_terminal_size().columns, 200)), file=output)


def screen(content: dict[str, Any], width: int, height: int = 200) -> list[str]:
    """The lines that show ``content``, none longer than ``width``."""
    lines = _head(content)
    if content["state"] == "empty":
        lines += ["", f"Nothing is reported yet in {content['folder']}/monitor.", "Call `accelerator.watch_run()`."]
        return [line[:width] for line in lines[:height]]
    loss = content["curves"].get("loss")
    ranks, events = _ranks(content["ranks"]), _events(content["events"], content["ranks"])
    room = max(4, min(14, height - len(lines) - len(ranks) - len(events) - 5))
    if loss is not None:
        lines += ["", *plot(loss["steps"], loss["values"], min(width, 100), room)]
    lines += ["", *ranks, "", *events]
    return [line[:width] for line in lines[:height]]


def _head(content: dict[str, Any]) -> list[str]:
    from ...health.throughput import clock_time

    newest = content["newest"]
    step = newest.get("step")
    total = newest.get("total_steps")
    words = [content["name"], content["state"].upper()]
    if step is not None:
        words.append(f"step {step}" + (f"/{total} ({100 * step // total}%)" if total else ""))
    if "eta_seconds" in newest and content["state"] == "running":
        words.append(f"{clock_time(newest['eta_seconds'])} left")
    numbers: list[str] = []
    if "loss" in newest:
        numbers.append(f"loss {_number(newest['loss'])}")
    if "learning_rate" in newest:
        numbers.append(f"lr {newest['learning_rate']:.3g}")
    for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if name in newest:
            numbers.append(f"{newest[name]:,.0f} {unit}")
            break
    if "step_seconds" in newest:
        wait = newest.get("wait_seconds")
        share = f", {wait / newest['step_seconds']:.0%} waiting for data" if wait is not None else ""
        numbers.append(f"{1000 * newest['step_seconds']:.3g} ms a step{share}")
    if "mfu" in newest:
        numbers.append(f"MFU {newest['mfu']:.1%}")
    return ["  ".join(words), "  ".join(numbers)]


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, (int, float)) else str(value)


def plot(steps: Sequence[int], values: Sequence[float | None], width: int, height: int) -> list[str]:
    """The values over the steps in dots of braille, with the numbers at the axes."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not points:
        return ["loss: no finite number yet"]
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    labels = [f"{high:.4g}", f"{(low + high) / 2:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns = max(10, width - margin)
    columns_of: dict[int, list[float]] = {}
    for step, value in points:
        at = round((step - first) / (last - first) * (2 * columns - 1)) if last > first else 0
        columns_of.setdefault(at, []).append(value)
    cells = [[0] * columns for _ in range(height)]
    before: int | None = None
    for x in sorted(columns_of):
        part = (high - statistics.fmean(columns_of[x])) / (high - low) if high > low else 0.5
        y = round(part * (4 * height - 1))
        for row in range(min(y, y if before is None else before), max(y, y if before is None else before) + 1):
            cells[row // 4][x // 2] |= _DOTS[x % 2][row % 4]
        before = y
    rows = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    marks = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}
    lines = [f"{marks.get(number, ''):>{margin - 2}} ┤{row}" for number, row in enumerate(rows)]
    lines.append(f"{'loss':>{margin - 2}} └{'─' * columns}")
    end = f"step {last}"
    lines.append(" " * margin + f"{first}" + end.rjust(columns - len(str(first))))
    return lines


def _ranks(ranks: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("rank", "device", "step", "step time", "data wait", "memory", "state")]
    for rank in ranks[:_NUM_RANKS]:
        rows.append(
            (
                str(rank["rank"]),
                str(rank["device"] or "-"),
                str(rank["step"] if rank["step"] is not None else "-"),
                _milliseconds(rank["step_seconds"]),
                _milliseconds(rank["wait_seconds"]),
                f"{rank['memory_bytes'] / 1e9:.2f} GB" if rank["memory_bytes"] else "-",
                rank["state"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ranks) > _NUM_RANKS:
        lines.append(f"... and {len(ranks) - _NUM_RANKS} more ranks")
    return lines


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None or not math.isfinite(seconds) else f"{1000 * seconds:.3g} ms"


def _events(events: Sequence[dict[str, Any]], ranks: Sequence[Any]) -> list[str]:
    lines: list[str] = []
    for event in events[-_NUM_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
        where = f"  step {event['step']}" if isinstance(event.get("step"), int) else ""
        who = "" if len(event["ranks"]) == len(ranks) else f"  rank {', '.join(map(str, event['ranks']))}"
        lines.append(f"{_SIGNS.get(event['event'], '·')} {at}  {describe(event)}{where}{who}")
    return lines


def describe(event: dict[str, Any]) -> str:
    """An event in a few words."""
    kind = event.get("event")
    folder = str(event.get("folder") or "").rpartition("/")[2]
    words = {
        "start": "started",
        "restart": f"restarted (attempt {event.get('attempt')})",
        "save": f"saved {folder}",
        "load": f"resumed from {folder or 'a checkpoint'}",
        "epoch": f"epoch {event.get('epoch')} done",
        "end": "finished",
        "stop": f"stopped: {event.get('text')}",
        "error": f"failed: {event.get('text')}",
    }
    return words.get(str(kind)) or str(event.get("text") or kind)


def is_terminal(output: TextIO = sys.stdout) -> bool:
    """Whether ``output`` can be drawn on."""
    return output.isatty()
