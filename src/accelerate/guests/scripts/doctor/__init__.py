"""Find problems of an accelerated script: hangs, results that differ on several processes, and data loss.

The script is parsed without running it. Names are followed as in the migration (`migrate.survey`). A name whose role
is uncertain causes no finding.

- `rules`: the table of all rules.
- `processes`, `preparing`, `steps`, `data`, `output`: how each is found, one rule a function.
- `subject`, `processes`: the one survey of a script that they ask.
- `fixes`: the cures that `--fix` writes.
"""

from __future__ import annotations

import difflib
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

from ..migrate.refuse import Refused, parsed
from ..migrate.source import Edit, apply
from .processes import Processes
from .rules import RULES, Severity
from .subject import Subject

#: The code of the remark about a comment that silences nothing.
_UNUSED: Final = "D001"
_COMMENT: Final = re.compile(r"#\s*accelerate:\s*ignore\b(?:\s*\[(?P<codes>[^\]]*)\])?")
_ALL: Final = ""
_NOTES: Final = {_UNUSED, *(rule.code for rule in RULES if rule.severity is Severity.NOTE and rule.fix is None)}


@final
@dataclass(frozen=True, order=True)
class Finding:
    """One mistake, with the line it is about.

    Attributes:
        text: what is wrong and what to do.
        code: of the rule, as in `rules.RULES`.
        edits: that cure it; none if the author has to decide.
    """

    line: int
    severity: str
    text: str
    code: str = ""
    edits: tuple[Edit, ...] = field(default=(), compare=False)


class Unaccelerated(Refused):
    """The error for a script that doesn't use the Accelerator."""


def examine(text: str, name: str) -> list[Finding]:
    """Return the findings about a script that no comment silences, in the order of its lines.

    Raises:
        Refused: it isn't Python, or doesn't use the Accelerator.
    """
    script = parsed(text, name)
    if not any(path.partition(".")[0] == "accelerate" for path in script.imported.values()):
        hint = f"`accelerate migrate {name}` shows what would change."
        raise Unaccelerated(f"{name}:1: it doesn't use accelerate. {hint}")
    subject = Subject(script)
    processes = Processes(subject)
    found = {
        Finding(
            place.node.lineno,
            rule.severity.value,
            f"{rule.text} {rule.cure}".format_map(place.words),
            rule.code,
            () if rule.fix is None else tuple(rule.fix(subject, processes, place)),
        )
        for rule in RULES
        for place in rule.check(subject, processes)
    }
    ignores = _Ignores(text)
    left = [each for each in found if not ignores.silences(each.line, each.code)]
    left += [Finding(line, Severity.NOTE.value, remark, _UNUSED) for line, remark in ignores.unused()]
    return sorted(left)


def fixed(text: str, name: str) -> str:
    """Return the script with the cures that are safe, or the same text if there are none.

    A cure that would break the script or bring another finding isn't written.

    Raises:
        Refused: as `examine`.
    """
    while (cured := next(_cured(text, name), None)) is not None:  # each leaves less to cure
        text = cured
    return text


def _cured(text: str, name: str) -> Iterator[str]:
    """Yield the script with one cure, for each that is safe."""
    before = examine(text, name)
    for finding in before:
        cured = apply(parsed(text, name), list(finding.edits))
        if finding.edits and _helps(cured, name, finding, before):
            yield cured


def _helps(cured: str, name: str, finding: Finding, before: list[Finding]) -> bool:
    """Return whether a cure leaves less of what it cures, and brings no new finding but notes."""
    try:
        after = Counter(each.code for each in examine(cured, name))
    except Refused:
        return False
    new = after - Counter(each.code for each in before)
    return finding.code in Counter(each.code for each in before) - after and set(new) <= _NOTES


def diff(before: str, after: str, name: str) -> str:
    """Return what a fix changes, as a unified diff."""
    old, new = ([f"{line}\n" for line in text.splitlines()] for text in (before, after))
    return "".join(difflib.unified_diff(old, new, name, f"{name} (fixed)"))


@final
class _Ignores:
    """The comments of a script that silence findings, and those without an effect so far."""

    def __init__(self, text: str) -> None:
        self._unused: dict[int, list[str]] = {}  # by line: codes that have silenced nothing so far
        self._codes: dict[int, list[str]] = {}
        for token in tokenize.generate_tokens(io.StringIO(text).readline) if "accelerate" in text else ():
            found = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if found is not None:
                codes = found["codes"]
                given = [_ALL] if codes is None else [code.upper() for code in re.findall(r"\w+", codes)]
                self._codes[token.start[0]], self._unused[token.start[0]] = given, list(given)

    def silences(self, line: int, code: str) -> bool:
        """Return whether a comment of this line silences a finding with this code, and note that it does."""
        found = [each for each in self._codes.get(line, ()) if each in (code, _ALL)]
        if found:
            self._unused[line] = [each for each in self._unused[line] if each not in found]
        return bool(found)

    def unused(self) -> Iterator[tuple[int, str]]:
        """Yield the lines of comments, or of their codes, that silenced nothing, with a remark."""
        for line, codes in self._unused.items():
            for code in codes:
                comment = f"# accelerate: ignore[{code}]" if code else "# accelerate: ignore"
                yield line, f"`{comment}` silences nothing in this line. Remove it."


__all__ = ["RULES", "Finding", "Severity", "Unaccelerated", "diff", "examine", "fixed"]
