"""What dependants and pip read about the package."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import accelerate

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_version_is_one_and_of_the_form_that_pins_compare() -> None:
    assert accelerate.__version__ == importlib.metadata.version("accelerate")
    assert re.fullmatch(r"1\.15\.\d+", accelerate.__version__)


def test_the_home_page_header_is_there_and_says_that_this_is_independent() -> None:
    address = importlib.metadata.metadata("accelerate")["Home-page"]
    assert address.endswith("#independent-implementation-of-the-huggingface-accelerate-interface")


def test_each_command_is_a_function_that_exists() -> None:
    distribution = importlib.metadata.distribution("accelerate")
    commands = {point.name: point for point in distribution.entry_points if point.group == "console_scripts"}
    assert commands.keys() == {
        "accelerate", "accelerate-config", "accelerate-estimate-memory", "accelerate-launch",
        "accelerate-merge-weights",
    }  # fmt: skip
    assert all(callable(point.load()) for point in commands.values())


def test_each_extra_that_an_error_names_exists() -> None:
    extras = set(importlib.metadata.metadata("accelerate").get_all("Provides-Extra") or [])
    missing = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require" and len(node.args) > 1:
                extra = node.args[1]
                if isinstance(extra, ast.Constant) and str(extra.value).replace("_", "-") not in extras:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno} names the extra {extra.value!r}")
    assert not missing


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_constraint_is_one_version_and_covers_what_is_required() -> None:
    import tomllib

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.split("==", line)[0].lower().replace("_", "-"): line for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+(; python_version >= \"3\.11\")?", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["test"], *extras["quality"], *extras["examples"]]
    names = {re.split(r"[\[<>=~!; ]", name)[0].lower() for name in required} - {"accelerate"}
    assert names <= pinned.keys()
