"""The rows of one part, written as JSON after each of them, so that what ends early leaves what it has found."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TITLES = {
    "a": "Does it run",
    "b": "The cost of a step",
    "c": "fp8, synchronisations, copies",
    "d": "Models in host memory",
    "e": "Saves and memory estimates",
}
PACKAGES = ("torch", "triton", "torchao", "transformers", "lightning", "pytorch-lightning")


def about_the_machine(device: str) -> dict[str, Any]:
    """Return the device's name, the versions, and the day."""
    import torch

    versions: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["cuda"] = str(torch.version.cuda)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({os.cpu_count()} cores)"
    return {"device": name, "versions": versions, "date": datetime.date.today().isoformat()}


@dataclass
class Sheet:
    """What a part has found: rows of a figure, its goal, and whether that is met."""

    part: str
    path: Path
    dry: bool
    machine: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    only: tuple[str, ...] = ()  # words: an attempt whose name has none of them keeps the rows from before

    def add(
        self,
        what: str,
        figure: float,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> None:
        """Add a figure and judge it."""
        goal, met = "", None
        if at_most is not None:
            goal, met = f"<= {at_most:g}", figure <= at_most
        elif at_least is not None:
            goal, met = f">= {at_least:g}", figure >= at_least
        self._append(what, "measured", figure, unit, goal, met, note)

    def skip(self, what: str, reason: str) -> None:
        """Add a row that says why there is no figure; one that is there already stays."""
        if self.only and any(row["what"] == what for row in self.rows):
            return
        self._append(what, "skipped", None, "", "", None, reason)

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Run ``measure``, which adds rows; an error becomes a row, and the part goes on."""
        if self.only and not any(word in what for word in self.only):
            return
        self.rows = [row for row in self.rows if row["what"] != what]  # an error from before
        try:
            measure()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self._append(what, "failed", None, "", "", False, f"{type(error).__name__}: {lines[-1][:300]}")

    def write(self, state: str = "running", error: str = "") -> None:
        """Replace the part's JSON by what is known now."""
        text = {
            "part": self.part, "title": TITLES[self.part], "state": state, "error": error, "dry": self.dry,
            **self.machine, "rows": self.rows,
        }  # fmt: skip
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(self.path)

    def _append(
        self, what: str, state: str, figure: float | None, unit: str, goal: str, met: bool | None, note: str
    ) -> None:
        row = {"what": what, "state": state, "figure": figure, "unit": unit, "goal": goal, "met": met, "note": note}
        row["date"] = self.machine["date"]
        self.rows = [one for one in self.rows if one["what"] != what] + [row]
        self.write()
        print(f"  {self.part}  {line_of(row)}", flush=True)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return "  ".join(text for text in (row["what"], figure_of(row), row["goal"], verdict_of(row), row["note"]) if text)


def figure_of(row: dict[str, Any]) -> str:
    """Return a row's figure with its unit, or its state."""
    if row["figure"] is None:
        return row["state"]
    figure = row["figure"]
    digits = f"{figure:,.0f}" if abs(figure) >= 1000 or figure == int(figure) else f"{figure:.4g}"
    return f"{digits} {row['unit']}".strip()


def verdict_of(row: dict[str, Any]) -> str:
    """Return whether the goal is met, in words; empty without a goal."""
    return "" if row["met"] is None else "met" if row["met"] else "not met"
