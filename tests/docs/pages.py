"""The code of the documentation: which blocks a page has, and how each kind is executed.

A page is run from top to bottom in one namespace, in a folder of its own, as a reader would who copies block after
block. Comments that a reader of the built page doesn't see steer it:

    <!-- setup                      names that the page takes for granted; run like a block
    loader = DataLoader(...)
    -->
    <!-- ranks: 2 -->               the page is run on 2 ranks (anywhere on the page)
    <!-- not run: REASON -->        the next block is only compiled (python) or left alone
    <!-- needs: PACKAGE PACKAGE -->  so are the next setup and block where one of these isn't installed
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = ROOT / "docs"

#: Blocks that hold no code: what was printed, patterns.
NOT_CODE = ("text",)
RUN = ("python", "bash", "yaml", "json", "toml", "diff")
#: Ends a block or script that hangs; they take seconds, and a hundred times as long on a loaded machine.
LIMIT_SECONDS = 800

_PART = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^ *```[ ]*$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^ *<!-- not run: (?P<reason>.*?) -->$"
    r"|^ *<!-- needs: (?P<packages>.*?) -->$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One piece of code of a page: where it stands, what it is, and why it isn't run."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None = None

    @property
    def place(self) -> str:
        """``docs/page.md:12``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page with a block of code, the README too; decisions are records and hold none."""
    found = [ROOT / "README.md", *sorted(DOCUMENTS.rglob("*.md"))]
    return [page for page in found if any(True for _ in blocks(page))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, hidden set-up included, in their order."""
    yield from blocks_of(page.read_text(), page)


def blocks_of(text: str, page: Path) -> Iterator[Block]:
    """The blocks of a text that stands in ``page``, in their order; a docstring is a text, too."""
    reason: str | None = None
    for part in _PART.finditer(text):
        if part["reason"] is not None:
            reason = part["reason"]
            continue
        if part["packages"] is not None:
            lacking = [name for name in part["packages"].split() if importlib.util.find_spec(name) is None]
            reason = f"{', '.join(lacking)}: not installed" if lacking else None
            continue
        group = "setup" if part["setup"] is not None else "code"
        line = text.count("\n", 0, part.start(group)) + 1
        language = "python" if group == "setup" else (part["language"].split() or [""])[0]
        indent = len(part["indent"] or "")
        code = "".join(row[indent:] if row[:indent].isspace() else row for row in part[group].splitlines(keepends=True))
        yield Block(page, line, language, code, reason)
        reason = reason if group == "setup" else None


def num_ranks(page: Path) -> int:
    """On how many ranks the page is run."""
    said = re.search(r"^<!-- ranks: (\d+) -->$", page.read_text(), re.MULTILINE)
    return int(said[1]) if said else 1


def run_page(page: Path, folder: str) -> int:
    """How many blocks were run, in the order of the page; raises what the first bad one raises."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    _execute(Path(__file__).with_name("prelude.py").read_text(), str(Path(__file__).with_name("prelude.py")), 1, names)
    count = 0
    for block in blocks(page):
        if block.language in NOT_CODE:
            continue
        _check(block, names)
        count += 1
    return count


def _check(block: Block, names: dict[str, Any]) -> None:
    if block.language == "python":
        if block.reason is None:
            _execute(block.code, str(block.page), block.line, names)
        else:
            ast.parse(block.code)
    elif block.language == "diff":
        ast.parse("".join(row[2:] if row.strip() else "\n" for row in block.code.splitlines(True) if row[0] != "-"))
    elif block.reason is None:
        _OTHERS[block.language](block)


def _execute(code: str, file: str, line: int, names: dict[str, Any]) -> None:
    exec(compile("\n" * (line - 1) + code, file, "exec"), names)


def _shell(block: Block) -> None:
    installs = re.search(r"\b(pip|apt|apt-get|npm|conda) install\b|\bmake (setup|demo|test)\b", block.code)
    assert not installs, f"{block.place}: a test must not run `{installs and installs[0]}`; say why it is not run"
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", block.code],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{block.place} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"


def _configuration(block: Block) -> None:
    from accelerate.settings import file

    Path("block.yaml").write_text(block.code)
    file.load("block.yaml")


def _json(block: Block) -> None:
    import json

    json.loads(block.code)


def _toml(block: Block) -> None:
    import tomllib

    tomllib.loads(block.code)


_OTHERS = {"bash": _shell, "yaml": _configuration, "json": _json, "toml": _toml}
