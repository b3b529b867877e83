"""Find values of secrets by their names and forms, to leave them out of the record."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

MASK: Final = "***"
#: Words of a name. ``hfToken`` and ``HF_TOKEN`` end with the same word.
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: The last word of a secret's name: ``api_key`` and ``HF_TOKEN``, but not ``tokenizer`` or ``max_tokens``.
_LAST_WORD: Final = re.compile(
    r"(|.*(?:api|access|auth|secret|private))key|.*(?<!non)(?:token|password|passwd|passphrase|credentials?)|"
    r"pwd|pass|auth|authorization|cookie|dsn"
)
#: A name with its value inside of a text: ``name=value``, ``"name": "value"``, ``--name value``.
_PAIR: Final = re.compile(r"""(?P<name>[\w.-]*\w)(?P<sign>["']?\s*[=:]\s*["']?)(?P<value>[^\s"'&?,;}\])]+)""")
_QUOTED: Final = re.compile(r"""(?P<name>[\w.-]*\w)["']?\s*[=:]\s*[rbf]?["'](?P<value>[^"']{4,})["']""")
_OF_URL: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
#: Forms of the tokens of known services, and long runs of mixed letters and digits.
_SHAPES: Final = re.compile(
    r"\b(?:hf_|sk_live_|rk_live_|gh[pousr]_|npm_|dop_v1_|r8_)[A-Za-z0-9]{16,}"
    r"|\b(?:github_pat_|glpat-|xox[abeoprs]-|pypi-|sk-(?=[\w-]*[0-9]))[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\bBearer\s+\S+|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{32,}\b"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable, option or key of this name usually holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return bool(words) and ("secret" in words or "secrets" in words or _LAST_WORD.fullmatch(words[-1]) is not None)


def masked(text: str, name: str = "") -> str:
    """Return the value of ``name`` with ``***`` in place of what looks like a secret; all of it if the name says so."""
    if is_secret_name(name) and text:
        return MASK

    def value_of(found: re.Match[str]) -> str:
        shown = MASK if is_secret_name(found["name"]) else found["value"]
        return f"{found['name']}{found['sign']}{shown}"

    return _SHAPES.sub(MASK, _PAIR.sub(value_of, _OF_URL.sub(MASK, text)))


def masked_arguments(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of a command without secrets: ``--api_key abc`` and ``--api_key=abc`` lose the value."""
    shown: list[str] = []
    option = ""
    for word in arguments:
        is_option = word.startswith("-")
        shown.append(masked(word, "" if is_option else option))
        option = word if is_option and "=" not in word else ""
    return shown


def secret_line(source: str) -> int | None:
    """Return the number of the first line of a source text that seems to hold a secret; None if there is none."""
    for number, line in enumerate(source.splitlines(), 1):
        quoted = any(is_secret_name(found["name"]) for found in _QUOTED.finditer(line))
        if quoted or _OF_URL.search(line) or _SHAPES.search(line):
            return number
    return None
