"""Scripts made from those of `bases.py`: with one mistake each (`faults.diff`), and right ones (`right.diff`).

An entry of these files begins with ``== name: BASE``. Its parts, divided by ``...``, are like those of a diff without
line numbers: lines of the base, with what goes (-) and what comes (+). A mark such as ``# D101`` at the end of a line
names the rule that has to find the mistake, in this line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tests.doctor import bases

_ENTRY: Final = re.compile(r"^== (\w+): (\w+)\n", re.MULTILINE)
_MARK: Final = re.compile(r"  # (D\d{3})$")


@final
@dataclass(frozen=True)
class Script:
    """A script, and the rule and the line of its mistake ("" and 0 if it has none)."""

    text: str
    code: str = ""
    line: int = 0


def _made(base: str, parts: str) -> Script:
    for part in re.split(r"^\.\.\.\n", parts.strip("\n") + "\n", flags=re.MULTILINE):
        old = "".join(f"{_MARK.sub('', line[1:])}\n" for line in part.splitlines() if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in part.splitlines() if line[:1] != "-")
        assert f"\n{base}".count(f"\n{old}") == 1, part
        base = f"\n{base}".replace(f"\n{old}", f"\n{new}")[1:]
    lines = base.splitlines()
    marks = [(found[1], number) for number, line in enumerate(lines, 1) if (found := _MARK.search(line))]
    assert len(marks) <= 1, marks
    return Script("\n".join(_MARK.sub("", line) for line in lines) + "\n", *(marks[0] if marks else ()))


def scripts(name: str) -> dict[str, Script]:
    """Return the scripts of a file, by name."""
    _, *fields = _ENTRY.split(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    entries = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    return {name: _made(getattr(bases, base), parts) for name, base, parts in entries}


FAULTS: Final = scripts("faults.diff")
RIGHT: Final = scripts("right.diff") | {
    name.lower(): Script(text) for name, text in vars(bases).items() if name.isupper()
}
