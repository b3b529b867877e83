"""docs/gpu.md, written from the JSON of the parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .sheet import TITLES, figure_of, verdict_of

HEAD = """# On a CUDA device

`make gpu` runs all of this on one machine with an H100 or H200 in at most 25 minutes and writes this page from what it
found; nothing is fetched. It takes the interpreter that it finds (`PYTHON=python3`), made for Python 3.12, torch 2.11
with CUDA 13, triton and pytest. "The peer" is Hugging Face's `accelerate` (`PEER_PYTHON`, or the interpreter's
own). It and Lightning are measured if they are installed. "Ours" is this checkout, on `PYTHONPATH`.

<!-- not run: it needs the machine that the page is about; the dry run has a test of its own -->
```bash
make wheels                                       # with a network, before: torchao's wheel into wheels/ (ignored)
make gpu                                          # on the machine: every part, then this page
python3 -m benchmarks.gpu --part b --seconds 30   # one part (a to e), at most 8 minutes
python3 -m benchmarks.gpu --limit 120             # every part, each for at most two minutes
python3 -m benchmarks.gpu --part d --only loading # some rows of a part; its others stay
python3 -m benchmarks.gpu --dry                   # every part small, on the CPU: `make slow` does it
```

Each part is a process with a limit and writes `benchmarks/gpu/found/PART.json`; one that fails leaves the others.
Every worker says first which `accelerate` it imported. "Met" judges the goal of the row. A row without a figure says
what it lacked: under `--limit`, mostly time.

`TEST_DEVICE=cuda python3 -m pytest -p tests.device.plugin tests/oracle` puts the ranks of the CPU's tests on the first
CUDA device, joined by gloo. On one H100 (2026-11-27, 12 workers, 69 s) 276 tests passed and 3 were skipped. Of the
tests of `make device` in `tests/multi`, 270 passed there and 66 failed, as one device stands for several:
gloo ends a process that shards over FSDP2 or sends a pipeline's values from CUDA memory (signal 11, "Bad address"),
torch warns of cuBLAS in a new thread (the tests take warnings for errors), and some compare with the CPU bit by bit.
"""


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| what | figure | goal | | note |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (row["what"], figure_of(row), row["goal"], verdict_of(row), row["note"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def read(folder: Path, part: str) -> dict[str, Any] | None:
    """Return the JSON of a part; None where it hasn't run."""
    path = folder / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def text(folder: Path) -> str:
    """Return the page: a table for each part that has run."""
    lines = [HEAD]
    for part, title in TITLES.items():
        found = read(folder, part)
        lines.append(f"## {part}. {title}\n")
        if found is None:
            lines.append("Not run yet.\n")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        small = " A dry run: the figures are of tiny sizes on the CPU." if found["dry"] else ""
        dates = " and ".join(sorted({row["date"] for row in found["rows"]} | {found["date"]}))
        lines.append(f"{found['device']}; {versions}; {dates}.{small}\n")
        if found["state"] != "done":
            lines.append(f"**{found['state'].capitalize()}**: {found['error'] or 'it was ended before its end'}\n")
        if found["rows"]:
            lines += [*_table(found["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(path: Path, folder: Path) -> None:
    """Write the page."""
    path.write_text(text(folder), encoding="utf-8")
    print(f"{path} is written from {folder}")


def mark_failed(path: Path, part: str, reason: str) -> None:
    """Note in a part's JSON that its process ended early; make the JSON where there is none."""
    found: dict[str, Any] = {
        "part": part, "title": TITLES[part], "dry": False, "device": "unknown", "versions": {}, "date": "", "rows": [],
    }  # fmt: skip
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | {"state": "failed", "error": reason}, indent=2) + "\n", encoding="utf-8")


def all_done(folder: Path, parts: list[str]) -> bool:
    """Return whether each of the parts came to its end."""
    states = [found["state"] if (found := read(folder, part)) else "not run" for part in parts]
    return all(state == "done" for state in states)
