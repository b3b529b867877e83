"""Each statement of the five documents has a test, or stands in pending.txt with what it waits for."""

from __future__ import annotations

import ast
import functools

from tests.seeds.tools import HERE, pending, rows


@functools.cache
def rows_with_tests() -> dict[str, list[str]]:
    """Row -> the tests that carry it."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("row", "pytest.mark.row"):
                        for argument in decorator.args:
                            assert isinstance(argument, ast.Constant)
                            found.setdefault(str(argument.value), []).append(f"{path.name}::{node.name}")
    return found


def test_every_row_is_tested_or_pending() -> None:
    missing = [
        f"{row}  {text}" for row, text in rows().items() if row not in rows_with_tests() and row not in pending()
    ]
    assert not missing, "neither tested nor pending:\n" + "\n".join(missing)


def test_only_known_rows_are_named() -> None:
    unknown = (rows_with_tests().keys() | pending().keys()) - rows().keys()
    assert not unknown


def test_pending_rows_say_what_they_wait_for() -> None:
    assert all(len(reason) > 10 for reason in pending().values())
