"""The terminal view of a run: numbers, the loss over the steps, the ranks and the last events."""

from __future__ import annotations

import re
import shutil
import statistics
import textwrap
import time
from collections.abc import Sequence
from typing import Final, TextIO

from ...settings import env
from ...watching import format_duration
from ...wording import some_ranks
from .document import Document, RankState, RunList, ShownEvent
from .reading import RunFiles, finite, number
from .records import FOLDER
from .snapshot import describe, snapshot

_BARS: Final = "▁▂▃▄▅▆▇█"
_SIGNS: Final = {
    "save": "✓", "load": "↺", "restart": "↻", "start": "▸", "stop": "■", "error": "✗", "non_finite": "✗",
    "warning": "▲", "epoch": "·", "end": "◂", "note": "•",
    "killed": "✗", "preempted": "↻",
}  # fmt: skip
_COLORS: Final = {
    "RUNNING": 32, "FINISHED": 34, "STOPPED": 31, "FAILED": 31, "SILENT": 33, "PREEMPTED": 33,
    "✓": 32, "✗": 31, "■": 31, "▲": 33, "▸": 34,
}  # fmt: skip
_COLORED: Final = re.compile(rf"(?<=  )({'|'.join(state for state in _COLORS if state.isalpha())})\b|^[✓✗■▲▸](?= )")
_NUM_EVENTS: Final = 8
_NUM_RANKS: Final = 16
_FRESH_SECONDS: Final = 5.0


def watch(run: RunFiles, output: TextIO, *, seconds: float = 1.0) -> None:
    """Draw the run on the terminal every ``seconds`` seconds, until it ends or the user leaves."""
    output.write("\033[?1049h\033[?25l")  # a screen of its own, without a cursor
    try:
        while True:
            run.refresh()
            content = snapshot(run)
            size = shutil.get_terminal_size()
            lines = colored(screen(content, size.columns, size.lines - 1))
            output.write("\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J")
            output.flush()
            if content["state"] in ("finished", "failed", "stopped"):
                break
            time.sleep(seconds)
    finally:
        output.write("\033[?25h\033[?1049l")
        output.flush()
    print("\n".join(colored(screen(snapshot(run), shutil.get_terminal_size().columns, 200))), file=output)


def colored(lines: Sequence[str]) -> list[str]:
    """Return the lines with colors for the run's state and its events, unless ``NO_COLOR`` is set."""
    if env.read("NO_COLOR"):
        return list(lines)
    return [_COLORED.sub(lambda found: f"\033[{_COLORS[found[0]]}m{found[0]}\033[0m", line) for line in lines]


def screen(content: Document, width: int, height: int = 200) -> list[str]:
    """Return the lines that show ``content``, none longer than ``width``."""
    lines = _head(content, width)
    if content["state"] == "empty":
        lines += [
            "",
            f"There is no run in {content['folder']} yet: no {FOLDER}/rank_*.jsonl here or in a folder below.",
            "Start the script with `accelerate launch --monitor`, or call `accelerator.watch_run()` in it.",
        ]
        return [_fitting(line, width) for line in lines[:height]]
    loss = content["curves"].get("loss")
    ranks, events = _ranks(content), _events(content["events"], content["num_ranks"], width)
    if loss is not None:
        lines += ["", loss_line(loss["steps"], loss["values"], width)]
    lines += ["", *ranks, "", *events]
    return [_fitting(line, width) for line in lines[:height]]


def table(runs: RunList) -> list[str]:
    """Return the lines that list the runs of a folder."""
    rows = [("run", "state", "began", "step", "loss", "ranks")]
    for run in runs["runs"]:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["began"]))
        step = "-" if run["step"] is None else str(run["step"])
        loss = _number(run["numbers"].get("loss", "-"))
        rows.append((run["run"], run["state"].upper(), began, step, loss, str(run["num_ranks"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    whys = ["", *(run["why"] for run in runs["runs"])]
    return [f"{line}  {why}".rstrip() for line, why in zip(lines, whys, strict=True)]


def _fitting(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _filled(parts: Sequence[str], width: int) -> list[str]:
    """Join the parts into as few lines of ``width`` as possible, without splitting a part."""
    lines = [parts[0]] if parts else []
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _head(content: Document, width: int) -> list[str]:
    newest = content["newest"]
    known = {name: found for name, value in newest.items() if (found := finite(number(value))) is not None}
    step = newest.get("step")
    total = known.get("total_steps")
    progress = [_fitting(content["name"], max(10, width - 12)), content["state"].upper()]
    if isinstance(step, int):
        progress.append(f"step {step}" + (f"/{total:.0f} ({min(100, 100 * step // total):.0f}%)" if total else ""))
    if "eta_seconds" in known and content["state"] == "running":
        progress.append(f"{format_duration(known['eta_seconds'])} left")
    numbers: list[str] = []
    if "loss" in newest:
        numbers.append(f"loss {_number(newest['loss'])}")
    if "learning_rate" in known:
        numbers.append(f"lr {known['learning_rate']:.3g}")
    for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if name in known:
            numbers.append(f"{known[name]:,.0f} {unit}")
            break
    if "step_seconds" in known:
        wait = known.get("wait_seconds")
        share = f", {wait / known['step_seconds']:.0%} waiting for data" if wait is not None else ""
        numbers.append(f"{1000 * known['step_seconds']:.3g} ms a step{share}")
    if "mfu" in known:
        numbers.append(f"MFU {known['mfu']:.1%}")
    if content["hours"] is not None:
        numbers.append(f"goodput {content['hours']['goodput']:.1%}")
    if content["state"] == "silent":
        silent = format_duration(content["now"] - content["seen"])
        numbers.append(f"no rank has written anything for {silent}")
    return _filled(progress, width) + _filled(numbers, width)


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, (int, float)) else str(value)


def loss_line(steps: Sequence[int], values: Sequence[float | None], width: int) -> str:
    """Return the first, the lowest and the last loss, and a bar for each part of the steps."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not points:
        return "loss: no finite number yet"
    (first, start), (best, low), (last, end) = points[0], min(points, key=lambda point: point[1]), points[-1]
    text = f"loss {start:.4g} at step {first}, lowest {low:.4g} at step {best}, {end:.4g} at step {last}  "
    count = min(len(points), max(10, min(width, 120) - len(text)))
    parts = [points[len(points) * part // count : len(points) * (part + 1) // count] for part in range(count)]
    means = [statistics.fmean(value for _, value in part) for part in parts]
    scale = (len(_BARS) - 1) / ((max(means) - min(means)) or 1.0)
    return text + "".join(_BARS[round((mean - min(means)) * scale)] for mean in means)


def _ranks(content: Document) -> list[str]:
    ranks, now = content["ranks"], content["now"]
    rows = [("rank", "state", "step", "step time", "data wait", "memory", "device")]
    listed = sorted(ranks, key=lambda rank: not rank["why"])[:_NUM_RANKS]
    for rank in listed:
        rows.append(
            (
                str(rank["rank"]),
                _state(rank, now),
                str(rank["step"] if rank["step"] is not None else "-"),
                _milliseconds(rank["step_seconds"]),
                _milliseconds(rank["wait_seconds"]),
                f"{memory / 1e9:.2f} GB" if (memory := number(rank["memory_bytes"])) else "-",
                str(rank["device"] or "-"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if content["spread"]:
        lines = [*_spread(content), "", lines[0]] + [
            f"{line}  {rank['why']}".rstrip() for line, rank in zip(lines[1:], listed, strict=True)
        ]
    elif len(ranks) > _NUM_RANKS:
        lines.append(f"... and {len(ranks) - _NUM_RANKS} more ranks")
    return lines


def _spread(content: Document) -> list[str]:
    """Return values that all ranks of a large run share, and the spread of their numbers."""
    states = ", ".join(f"{count:,} {state}" for state, count in content["states"].items())
    lines = [f"{content['num_ranks']:,} ranks: {states}", f"{'':>10}  smallest  middle     90 %     99 %  largest"]
    for name, shown in content["spread"].items():
        title = {"step_seconds": "step time", "wait_seconds": "data wait", "memory_bytes": "memory"}[name]
        values = (shown["smallest"], shown["middle"], shown["ninetieth"], shown["ninety_ninth"], shown["largest"])
        texts = [f"{value / 1e9:.2f} GB" if name == "memory_bytes" else _milliseconds(value) for value in values]
        lines.append(f"{title:>10}  " + " ".join(text.rjust(8) for text in texts))
    return lines


def _state(rank: RankState, now: float) -> str:
    silent_seconds = now - rank["seen"]
    if rank["state"] == "running" and silent_seconds > _FRESH_SECONDS:
        return f"{silent_seconds:.0f} s ago"
    return str(rank["state"])


def _milliseconds(value: object) -> str:
    seconds = finite(number(value))
    return "-" if seconds is None else f"{1000 * seconds:.3g} ms"


def _events(events: Sequence[ShownEvent], num_ranks: int, width: int) -> list[str]:
    lines: list[str] = []
    for event in events[-_NUM_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
        where = f"  step {step}" if isinstance(step := event.get("step"), int) else ""
        repeated = f" ({event['times']} times)" if event["times"] > 1 else ""
        named = some_ranks(event["ranks"], num_ranks=event["num_ranks"])
        who = "" if event["num_ranks"] == num_ranks else f"  {named}"
        text = f"{_SIGNS.get(event['event'], '·')} {at}  {describe(event)}{repeated}{where}{who}"
        # Errors are shown in full; other events have one line.
        ending = event["event"] in ("error", "stop", "killed", "preempted")
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 12) if ending else [text]
    return lines
