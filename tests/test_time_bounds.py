"""A test passes on a slow and loaded machine: what it measures in seconds has a wide bound, or none."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
#: A quiet machine needs at most a fifth of it for anything that is bounded so; a slow one may take five times as long.
SHORTEST_BOUND_SECONDS = 5.0
#: Suites of their own, which nothing else runs beside.
APART = ("device", "trackers", "engines")
TIME = re.compile(r"second|elapsed|took|taken|duration|monotonic|perf_counter|process_time|time\.time|waited|slowest")


def bounds(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each assertion that something measured in seconds is below a constant."""
    compares = (
        node
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Compare)
    )
    for compare in compares:
        sides = [compare.left, *compare.comparators]
        for (left, right), operator in zip(itertools.pairwise(sides), compare.ops, strict=True):
            if not isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                continue
            below, above = (right, left) if isinstance(operator, ast.Gt | ast.GtE) else (left, right)
            is_short = isinstance(above, ast.Constant) and (
                isinstance(above.value, int | float) and above.value < SHORTEST_BOUND_SECONDS
            )
            if is_short and TIME.search(ast.unparse(below)):
                yield compare.lineno, ast.unparse(compare)


def test_what_is_too_short_is_seen() -> None:
    short = ["assert seconds < 0.15", "assert 1.9 > took", "assert 0.4 < time.monotonic() - began <= 2"]
    fine = ["assert seconds < 8", "assert seconds > 0.2", "assert took < limit", "assert loss < 0.15"]
    assert [len(list(bounds(ast.parse(line)))) for line in [*short, *fine]] == [1, 1, 1, 0, 0, 0, 0]


def test_no_test_fails_because_a_machine_is_slow() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in APART]
    assert len(files) > 300
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path in files
        for line, text in bounds(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, found
