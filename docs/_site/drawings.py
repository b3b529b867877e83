"""The drawings of the pages, as SVG text. What a drawing shows is computed by the code that it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from torch.utils.data import BatchSampler, SequentialSampler

from accelerate.data_loader import BatchSamplerShard

#: One hue per rank, legible on white and on black.
HUES: Final = ("#3f7cac", "#c8553d", "#588157", "#8e6c8a")
FONT: Final = "font-family='system-ui, sans-serif' fill='currentColor'"


def svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """One drawing: scales to the page, and says to a screen reader what it is."""
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' width='{width:g}' style='max-width:100%;height:auto' role='img' "
        f"aria-label='{escape(title, quote=True)}' xmlns='http://www.w3.org/2000/svg'>"
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0 0 8 4 0 8z' fill='currentColor'/></marker></defs>"
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", extra: str = "") -> str:
    """A line of words."""
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}' {FONT} {extra}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, lines: Sequence[str], *, hue: str = "#888") -> str:
    """A rounded box; the first line is its name."""
    middle = y + height / 2 - (len(lines) - 1) * 8 + 5
    parts = [
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' fill='{hue}' fill-opacity='.14' "
        f"stroke='{hue}' stroke-width='1.5'/>"
    ]
    for number, line in enumerate(lines):
        size, extra = (12, "font-weight='600'") if number == 0 else (11, "opacity='.8'")
        parts.append(text(x + width / 2, middle + number * 16, line, size=size, anchor="middle", extra=extra))
    return "".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    """A line that ends in a tip."""
    dashes = " stroke-dasharray='4 3'" if dashed else ""
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='currentColor' stroke-width='1.3'"
        f"{dashes} marker-end='url(#tip)'/>"
    )


# -- what happens in prepare ------------------------------------------------------------------------------------


def prepare() -> str:
    """The way of the objects through ``prepare``."""
    given = (("model", HUES[0]), ("optimizer", HUES[1]), ("loader", HUES[2]), ("scheduler", HUES[3]))
    becomes = (
        ("on its device, in its precision", "whole on each rank, or in shards"),
        ("steps at the end of a window", "with the loss scaler inside"),
        ("this rank's part of the data", "on the device, with a position"),
        ("follows the optimizer", "stands still where a step was skipped"),
    )
    parts = [text(60, 18, "what you give", anchor="middle"), text(655, 18, "what you get back", anchor="middle")]
    for row, ((name, hue), lines) in enumerate(zip(given, becomes, strict=True)):
        y = 30 + row * 62
        parts += [box(8, y, 104, 46, [name], hue=hue), arrow(112, y + 23, 158, y + 23)]
        parts += [arrow(494, y + 23, 534, y + 23), box(538, y, 234, 46, [lines[0], lines[1]], hue=hue)]
    parts.append(
        "<rect x='162' y='30' width='330' height='232' rx='8' fill='none' stroke='currentColor' opacity='.5'/>"
    )
    steps = (
        ("1  sort", "one look at every argument"),
        ("2  check", "refused here, before anything changes"),
        ("3  place", "precision, tensor parallel, recompute,"),
        ("", "compile, shard: always in this order"),
        ("4  rebind", "optimizers follow parameters by name"),
        ("5  wrap", "loaders, optimizers, schedulers"),
    )
    for row, (name, words) in enumerate(steps):
        y = 64 + row * 34
        parts += [text(176, y, name, extra="font-weight='600'"), text(246, y, words, size=12, extra="opacity='.85'")]
    return svg(
        780, 276, parts, "Objects are sorted, checked, placed, rebound and wrapped, and come back in the same order"
    )


# -- a batch through a step -------------------------------------------------------------------------------------


def step() -> str:
    """Two micro-batches of one update: what runs always, and what only where the window is complete."""
    lanes = ("loader", "accumulate", "model(batch)", "backward", "optimizer", "scheduler")
    notes = (
        (
            ("batch 1", "next is read already"),
            ("window open", "no reduction"),
            ("autocast", "outputs in fp32"),
            ("loss / 2", "gradients stay local"),
            ("step(): nothing", "zero_grad(): nothing"),
            ("step(): nothing", ""),
        ),
        (
            ("batch 2", "known: last or not"),
            ("window complete", "ranks will meet"),
            ("autocast", "outputs in fp32"),
            ("loss / 2", "gradients are reduced"),
            ("unscale, step", "zero_grad() clears"),
            ("advances", "unless it was skipped"),
        ),
    )
    parts: list[str] = []
    for column, name in enumerate(lanes):
        parts.append(text(82 + column * 142, 18, name, anchor="middle", extra="font-weight='600'"))
    for row, lines in enumerate(notes):
        y = 32 + row * 84
        hue = "#888" if row == 0 else HUES[2]
        for column, cell in enumerate(lines):
            x = 14 + column * 142
            parts.append(box(x, y, 130, 54, [line for line in cell if line], hue=hue))
            if column:
                parts.append(arrow(x - 12, y + 27, x - 1, y + 27))
    parts.append(arrow(792, 88, 792, 112, dashed=True))
    return svg(866, 178, parts, "Two micro-batches of one update, from the loader to the scheduler")


# -- who gets which sample --------------------------------------------------------------------------------------


def shares(
    size: int, batch_size: int, num_ranks: int, *, split: bool = False, even: bool = True, drop: bool = False
) -> list[list[list[int]]]:
    """``[rank][batch][row]`` -> sample, as prepared loaders hand them out."""
    whole = BatchSampler(SequentialSampler(range(size)), batch_size, drop)
    return [
        [list(batch) for batch in BatchSamplerShard(whole, num_ranks, rank, split_batches=split, even_batches=even)]
        for rank in range(num_ranks)
    ]


def who_gets_what(size: int, batch_size: int, num_ranks: int, **policy: bool) -> str:
    """A row per rank and a cell per sample; samples that complete the last round are hatched."""
    found = shares(size, batch_size, num_ranks, **policy)
    cell, left = 28, 62
    widest = max((len(batch) for rank in found for batch in rank), default=0)
    rounds = max(len(rank) for rank in found)
    parts = [
        "<defs><pattern id='more' width='6' height='6' patternTransform='rotate(45)' patternUnits='userSpaceOnUse'>"
        "<line x1='0' y1='0' x2='0' y2='6' stroke='currentColor' stroke-width='1.6' opacity='.45'/></pattern></defs>"
    ]
    seen: set[int] = set()
    places = [(number, rank) for number in range(rounds) for rank in range(num_ranks)]
    for number, rank in places:
        batch = found[rank][number] if number < len(found[rank]) else []
        for row, sample in enumerate(batch):
            x, y = left + number * (widest * cell + 16) + row * cell, 26 + rank * (cell + 12)
            parts.append(
                f"<rect x='{x}' y='{y}' width='{cell - 2}' height='{cell}' rx='3' fill='{HUES[rank % 4]}' "
                f"fill-opacity='.3' stroke='{HUES[rank % 4]}'/>"
            )
            if sample in seen:
                parts.append(f"<rect x='{x}' y='{y}' width='{cell - 2}' height='{cell}' rx='3' fill='url(#more)'/>")
            parts.append(text(x + cell / 2 - 1, y + 19, str(sample), size=12, anchor="middle"))
            seen.add(sample)
    for number in range(rounds):
        parts.append(
            text(left + number * (widest * cell + 16), 16, f"batch {number + 1}", size=11, extra="opacity='.7'")
        )
    for rank in range(num_ranks):
        parts.append(text(8, 45 + rank * (cell + 12), f"rank {rank}", size=12))
    width, height = left + rounds * (widest * cell + 16), 30 + num_ranks * (cell + 12)
    return svg(width, height, parts, f"{size} samples in batches of {batch_size} over {num_ranks} ranks")


# -- a checkpoint is committed ----------------------------------------------------------------------------------


def commit() -> str:
    """The order of writes that makes a checkpoint whole or absent."""
    steps = (
        ("stage", "files beside the target"),
        ("flush", "every byte on the disk"),
        ("agree", "all ranks, or none"),
        ("manifest", "sizes and checksums, last"),
        ("prune", "old ones, only now"),
    )
    parts: list[str] = []
    for column, (name, words) in enumerate(steps):
        x = 8 + column * 168
        parts.append(box(x, 30, 152, 54, [name, words], hue=HUES[2] if name == "manifest" else "#888"))
        if column:
            parts.append(arrow(x - 16, 57, x - 1, 57))
    parts.append(text(8, 18, "killed here: the newest is the one before", size=12, extra="opacity='.8'"))
    parts.append(text(832, 18, "killed here: this one loads", size=12, anchor="end", extra="opacity='.8'"))
    return svg(840, 94, parts, "Stage, flush, agree, write the manifest, prune")


DRAWINGS: Final[dict[str, Callable[[], str]]] = {
    "prepare": prepare,
    "step": step,
    "commit": commit,
    "shares": lambda: who_gets_what(22, 4, 2),
    "shares-split": lambda: who_gets_what(22, 4, 2, split=True),
    "shares-uneven": lambda: who_gets_what(22, 4, 2, even=False),
    "shares-drop": lambda: who_gets_what(22, 4, 2, drop=True),
}
