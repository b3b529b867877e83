"""Comparing example scripts: an example of one feature differs from the base example in that feature only."""

from __future__ import annotations

from pathlib import Path


def get_function_contents_by_name(lines: list[str], name: str) -> list[str]:
    """Return the lines of the function ``training_function`` or ``main``.

    Raises:
        ValueError: another name is asked for.
    """
    if name not in ("training_function", "main"):
        raise ValueError(f"`{name}` is not compared; use `training_function` or `main`.")
    found: list[str] = []
    inside = False
    for line in lines:
        if line.startswith(f"def {name}("):
            inside = True
        elif inside and line[:1].strip() and not line.startswith((")", "#")):
            break
        if inside:
            found.append(line)
    return found


def clean_lines(lines: list[str]) -> list[str]:
    """Return the lines without comments and blank ones."""
    return [line for line in lines if not line.lstrip().startswith("#") and line.strip()]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Return the lines that the base example has and the example of a feature lacks.

    Compared is ``main`` with ``parser_only``, else ``training_function``. Lines that ``secondary_filename``
    has, which shows how the feature changes them, are not reported.
    """
    name = "main" if parser_only else "training_function"

    def contents(filename: str) -> list[str]:
        lines = Path(filename).read_text(encoding="utf-8").splitlines(keepends=True)
        return clean_lines(get_function_contents_by_name(lines, name))

    here = set(contents(feature_filename))
    missing = [
        line for line in contents(base_filename) if line not in here and "TESTING_MOCKED_DATALOADERS" not in line
    ]
    if secondary_filename is None:
        return missing
    shown = set(contents(secondary_filename))
    return [line for line in missing if line not in shown]
