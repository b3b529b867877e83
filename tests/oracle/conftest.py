"""The table that the oracle suite ends with: what was tried, and how much of it was right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent.name
Cells = Callable[[str, int, int], None]
_start = time.monotonic()


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> Cells:
    """Notes a row of the table: a name, cells tried, cells right. Tests without rows count as one cell each."""
    properties: list[Any] = request.node.user_properties
    return lambda name, tried, right: properties.append(("oracle", (name, tried, right)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table, where the oracle suite was among what was run."""
    table: dict[tuple[str, str], list[int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            file, _, name = report.nodeid.partition("::")
            if report.when != "call" or Path(file).parent.name != HERE:
                continue
            rows = [value for key, value in report.user_properties if key == "oracle"]
            for row, tried, right in rows or [(name.partition("[")[0], 1, int(outcome == "passed"))]:
                cell = table.setdefault((Path(file).stem.removeprefix("test_"), row.removeprefix("test_")), [0, 0])
                cell[0] += tried
                cell[1] += right
    if not table:
        return
    terminalreporter.section("oracle: cells tried, cells right")
    for (file, row), (tried, right) in sorted(table.items()):
        terminalreporter.line(f"{file:14s} {row[:84]:84s} {tried:6d} {right:6d}{'' if tried == right else '  WRONG'}")
    totals = [sum(column) for column in zip(*table.values(), strict=True)]
    terminalreporter.line(f"{'':14s} {'all':84s} {totals[0]:6d} {totals[1]:6d}")
    spent = os.times()
    cpu_seconds = spent.user + spent.system + spent.children_user + spent.children_system
    wall_seconds = time.monotonic() - _start
    terminalreporter.line(f"CPU time of all processes: {cpu_seconds:.0f} s; wall time: {wall_seconds:.0f} s")
