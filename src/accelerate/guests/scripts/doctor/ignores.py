"""Comments that silence findings of their line: ``# accelerate: ignore[D604]``, or without codes for all."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final, final

#: The code of the remark about a comment that silences nothing.
UNUSED: Final = "D001"
_COMMENT: Final = re.compile(r"#\s*accelerate:\s*ignore\b(?:\s*\[(?P<codes>[^\]]*)\])?")
_ALL: Final = ""


@final
class Ignores:
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
