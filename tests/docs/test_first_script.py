"""The README's first script runs as it says: on one process and on two, with what its install line gives."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import LIMIT_SECONDS, ROOT, blocks
from tests.python_path import python_path

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)

#: What `pip install .` gives (pyproject.toml), besides Python's own modules.
INSTALLED = {"accelerate", "torch", "numpy", "yaml", "packaging", "safetensors"}


def first_script() -> str:
    return next(block.code for block in blocks(ROOT / "README.md") if block.language == "python")


def printed(command: list[str], script: Path) -> list[float]:
    """The percentage of each epoch."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "HF_HOME": str(script.parent), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command, str(script)], env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert run.returncode == 0, run.stderr
    return [float(number) for number in re.findall(r"^epoch \d+: ([\d.]+) %", run.stdout, re.MULTILINE)]


def test_the_first_script_needs_only_what_is_installed_with_the_package() -> None:
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(first_script()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported <= INSTALLED | set(sys.stdlib_module_names)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "first.py"
    path.write_text(first_script())
    return path


def test_the_first_script_learns_the_same_on_one_process_and_on_two(script: Path) -> None:
    one = printed([], script)
    two = printed(["-m", "accelerate.commands.main", "launch", "--cpu", "--num_processes", "2"], script)
    assert len(one) == len(two) == 5
    assert one[-1] > 90
    # sums in another order may turn a point on the very edge of the ring
    assert two == pytest.approx(one, abs=0.5)
