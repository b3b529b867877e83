"""The option classes of the reference: each with a table of its arguments, made from their declarations."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from html import escape
from typing import Any, Final

from accelerate.settings.option import OptionGroup, OptionInfo, options_of

#: What fields mean that are an option class's own, and no settings.
OWN_FIELDS: Final = {
    "AutocastKwargs.output_dtype": "The precision of a prepared model's outputs; None leaves them as computed.",
    "PreemptionPolicy.signals": "The signals that ask the run to save and end.",
}
#: What an option takes whose annotation doesn't say it.
_WORDS: Final = {"list": "list[str]", "mapping": "dict", "document": "str or dict", "object": "object"}
_ARGUMENT: Final = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"^::: (accelerate(?:\.\w+)+)\n(?!    options:)", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """Show each option class of a page by its docstring, a table of its arguments, and its methods."""
    return _DIRECTIVE.sub(lambda found: _section(found[1]) or found[0], markdown + "\n")


def _section(address: str) -> str | None:
    """Return the section about an option class; None where the name is something else."""
    home, _, name = address.rpartition(".")
    try:
        cls = getattr(importlib.import_module(home), name, None)
    except ModuleNotFoundError:
        return None
    if not (isinstance(cls, type) and issubclass(cls, OptionGroup)):
        return None
    shown = "    options:\n      show_bases: false\n      merge_init_into_class: false\n      members: false\n"
    shown += "      show_docstring_parameters: false\n      show_docstring_attributes: false\n"
    parts = [f"::: {address}\n{shown}", table(cls)]
    for member in _members(cls):
        parts.append(
            f"::: {address}.{member}\n    options:\n      heading_level: 3\n      show_root_full_path: false\n"
        )
    return "\n".join(parts)


def table(cls: type[OptionGroup]) -> str:
    """Return the table of a class's arguments, in the order in which its constructor takes them."""
    options = {option.name: option for option in options_of(cls)}
    described = dict(_ARGUMENT.findall(_arguments(cls)))
    rows = ["| argument | what it does |", "|---|---|"]
    for field in dataclasses.fields(cls):
        option, help = options.get(field.name), described.get(field.name, "")
        if option is not None:
            kind, default = type_of(cls, option), default_of(option.default)
            help = f"{meaning(option, help)}<br>{names(option)}".removesuffix("<br>")
        else:
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            kind, default = code(str(field.type)), default_of(made)
            help = help or OWN_FIELDS[f"{cls.__name__}.{field.name}"]
        rows.append(f"| `{field.name}`<br>{kind}<br>by default {default} | {help} |")
    return "\n".join(rows) + "\n"


def _arguments(cls: type) -> str:
    """Return the part of a class's docstring that describes its arguments."""
    return re.split(r"^(?:Args|Attributes):\n", inspect.getdoc(cls) or "", flags=re.MULTILINE)[-1]


def type_of(cls: type[OptionGroup], option: OptionInfo) -> str:
    """Return the type of an option in a table's cell: its annotation where that says something."""
    homes = (inspect.get_annotations(base) for base in cls.__mro__)
    annotated = next(str(home[option.name]) for home in homes if option.name in home)
    named = annotated.replace("Any | None", "Any")
    return code(_WORDS.get(option.kind, option.kind) if named == "Any" else named)


def default_of(value: object) -> str:
    """Return a default in a table's cell, as it is written in Python."""
    if isinstance(value, Enum):
        return code(repr(value.value))
    plain = isinstance(value, (str, int, float, bool, tuple, list, dict, type(None)))
    return code(repr(value) if plain else str(value))


def meaning(option: OptionInfo, described: str = "") -> str:
    """Return what an option does, which values it takes, and the question that `accelerate config` asks."""
    parts = [_text(re.sub(r"\s+", " ", described) or option.help)]
    if option.choices:
        parts.append(f"One of {', '.join(code(choice) for choice in option.choices)}.")
    if option.minimum is not None:
        parts.append(f"At least {option.minimum:g}.")
    if option.question:
        parts.append(f"<br>*Asked: {_text(option.question)}*")
    return " ".join(parts)


def names(option: OptionInfo) -> str:
    """Return an option's flag, key of the file and variable, each on a line that says which it is."""
    file = ".".join(part for part in (option.section, option.key) if part) if option.key else None
    lines = [("flag", option.flag), ("key", file), *(("variable", name) for name in option.env)]
    return "<br>".join(f"{kind} `{name}`" for kind, name in lines if name)


def _members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that the class itself has and describes."""
    for name, value in vars(cls).items():
        inner: Any = getattr(value, "__func__", value)
        known = inspect.isfunction(inner) or isinstance(value, (property, cached_property))
        if known and not name.startswith("_") and inspect.getdoc(inner):
            yield name


def _text(words: str) -> str:
    """Return words as text in a cell of a table."""
    return escape(words, quote=False).replace("|", "\\|")


def code(word: str) -> str:
    """Return a word as code."""
    return f"`{word}`"
