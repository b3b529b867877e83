"""Whatever `make test` leaves out, a command of the Makefile runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: `make deepspeed` compiles an optimizer for minutes where somebody asks for it by RUN_SLOW=1.
BY_HAND = {"tests/deepspeed/test_training.py"}


def run_slow() -> set[str]:
    """The files and folders that some command runs with RUN_SLOW=1."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("\tRUN_SLOW=1")]
    return {path for line in lines for path in re.findall(r"tests/[\w./]+", line)}


def left_out() -> set[str]:
    """The test files of which `make test` leaves out a part."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^from tests\.slow import|\"RUN_SLOW\"", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_every_slow_test_is_in_a_command_of_the_makefile() -> None:
    ran = run_slow()
    files = left_out() - BY_HAND - {"tests/unit/test_utils/test_testing.py", "tests/test_slow_suites.py"}
    assert len(files) > 30
    missing = [name for name in sorted(files) if not any(name == one or name.startswith(f"{one}/") for one in ran)]
    assert not missing, f"no command of the Makefile runs them with RUN_SLOW=1: {missing}"


def test_what_a_skipped_test_names_is_a_command_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"\bslow_for\(\s*\"[^\"]*\",\s*\"(\w+)\"", text)}
    named |= {name for text in texts for name in re.findall(r"RUN_SLOW=1 \(make (\w+)\)", text)}
    assert len(named) >= 3 and named <= targets, named - targets
