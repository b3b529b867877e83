"""Every documented callable is there and takes the documented arguments: same names, same order, same defaults.

`signatures.txt` has one module a paragraph (``## accelerate.state``) and one callable a line. Arguments of our own may
follow the documented ones, by keyword and with a default.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).parent
EMPTY: Final = inspect.Parameter.empty

#: Documented callables whose signature is ours on purpose: name -> why.
DIFFERENT: Final[dict[str, str]] = {}

Argument = tuple[str, str]  # name (with its stars), default as text (empty: none)


def parse_arguments(text: str) -> list[Argument]:
    """`(a, b=1, *args)` -> [("a", ""), ("b", "1"), ("*args", "")]; commas inside brackets and quotes don't split."""
    parts, depth, quote, current = [], 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current)
    pairs = (part.strip().partition("=") for part in parts if part.strip())
    return [(name, default) for name, _, default in pairs]


def documented() -> Iterator[tuple[str, list[Argument]]]:
    """`("accelerate.state:PartialState", arguments)` for each documented function, class and method."""
    module = ""
    for line in (HERE / "signatures.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            module = line[3:].strip()
        elif line.strip():
            name, _, arguments = line.strip().partition("(")
            yield f"{module}:{name}", parse_arguments(arguments.removesuffix(")"))


DOCUMENTED: Final = dict(documented())


@functools.cache
def module_of(name: str) -> Any:
    """The module, or None where it isn't built."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def find(address: str) -> Any:
    """The callable, or None where it (or what it hangs on) isn't built."""
    module_name, _, name = address.partition(":")
    found = module_of(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def actual(function: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if parameters and parameters[0].name in ("self", "cls") else parameters


def same_default(written: str, parameter: inspect.Parameter) -> bool:
    """Every documented call means the same: a required argument may have a default here, but not the other way."""
    default = parameter.default
    if written == "":
        return True
    if default is EMPTY:
        return False
    shown = default.__name__ if inspect.isfunction(default) else repr(default)
    return written in (shown, str(default), repr(str(default)))


def by_position(expected: list[Argument]) -> list[str]:
    """The documented names that can be given by position: those before ``*args``."""
    names = [name for name, _ in expected]
    end = next((index for index, name in enumerate(names) if name.startswith("*")), len(names))
    return names[:end]


def differences(address: str, expected: list[Argument], function: Any) -> list[str]:
    ours = actual(function)
    found: list[str] = []
    names = [name for name, _ in expected if not name.startswith("*")]
    here = {parameter.name: parameter for parameter in ours}
    swallows = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours)
    positional = [p.name for p in ours if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    for position, name in enumerate(names):
        if name not in here:
            if not swallows:
                found.append(f"lacks {name}")
        elif name not in by_position(expected):
            continue
        elif name not in positional:
            found.append(f"takes {name} by keyword only")
        elif positional.index(name) != position:
            found.append(f"has {name} at position {positional.index(name)}, documented {position}")
    for name, default in expected:
        if name in here and not same_default(default, here[name]):
            found.append(f"{name} defaults to {here[name].default!r}, documented {default or 'required'}")
    for parameter in ours:
        is_extra = parameter.name not in names and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if is_extra and parameter.default is EMPTY:
            found.append(f"requires {parameter.name}, which is not documented")
    stars = {name for name, _ in expected if name.startswith("*")}
    if any(name.startswith("**") for name in stars) and not swallows:
        found.append("takes no further keywords")
    return [f"{address} {each}" for each in found]


@pytest.mark.parametrize("module", sorted({address.partition(":")[0] for address in DOCUMENTED}))
def test_documented_callables_take_the_documented_arguments(module: str) -> None:
    found = [
        each
        for address, expected in DOCUMENTED.items()
        if address.startswith(f"{module}:") and address not in DIFFERENT
        for each in differences(address, expected, find(address))
    ]
    assert not found, "\n".join(found)


def test_every_documented_callable_is_there() -> None:
    missing = [address for address in DOCUMENTED if find(address) is None]
    assert not missing, "\n".join(missing)


def test_the_exceptions_are_documented_and_differ() -> None:
    for address in DIFFERENT:
        assert differences(address, DOCUMENTED[address], find(address)), f"{address} is as documented now"


def test_a_difference_is_found() -> None:
    def ours(tensor: Any, dim: int = 1, *, extra: int = 0) -> None: ...

    expected = parse_arguments("tensor, dim=0, pad_index=0, **kwargs")
    assert differences("f", expected, ours) == [
        "f lacks pad_index",
        "f dim defaults to 1, documented 0",
        "f takes no further keywords",
    ]
    assert not differences("f", parse_arguments("tensor, dim=1"), ours)


def test_every_module_of_the_interface_is_listed() -> None:
    text = (HERE / "signatures.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^## accelerate", text, re.MULTILINE)) == 30
