"""The pages that are made from the declarations themselves: commands, settings under each name, public names."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from options import default_of, meaning, names, type_of

from accelerate.commands.main import commands, main
from accelerate.settings.document import options_with_groups
from accelerate.settings.option import OptionGroup, OptionInfo
from accelerate.settings.tree import GROUPS
from tests.contract.public_modules import PUBLIC_MODULES, public_module, public_names

ROOT = Path(__file__).resolve().parent.parent.parent


def commands_page() -> str:
    """The help of every command, as it is printed."""
    parts = [
        "# Commands",
        "",
        "Made from the commands themselves. `accelerate COMMAND --help` prints the same.",
        "",
    ]
    for name, command in commands().items():
        option = "--help-all" if name == "launch" else "--help"
        parts += [f"## accelerate {name}", "", command.help, "", "```text", _printed(name, option), "```", ""]
    return "\n".join(parts)


def _printed(name: str, option: str) -> str:
    """What a command prints for its help, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([name, option])
    return output.getvalue().rstrip()


def settings_page() -> str:
    """A table per group: what a setting is called as a flag, in the file and in the environment."""
    parts = [
        "# Settings",
        "",
        "Made from the declarations. A value is taken from the argument in the script, else the flag, else the file,",
        "else the environment, else the default; `accelerate launch --explain` shows which one it was.",
        "",
    ]
    groups: dict[str, list[str]] = {}
    for group, option in options_with_groups():
        if option.flag or option.key or option.env:
            groups.setdefault(option.group, []).append(_row(GROUPS[group], option))
    for title, rows in groups.items():
        head = ["| names | what it does |", "|---|---|"]
        parts += [f"## {title}", "", *head, *rows, ""]
    return "\n".join(parts)


def _row(group: type[OptionGroup], option: OptionInfo) -> str:
    default = "" if option.launched is None else f", by default {default_of(option.launched)}"
    return f"| {names(option)} | {meaning(option)}<br>{type_of(group, option)}{default} |"


def public_names_page() -> str:
    """Make a table per public module: its names, and what each is."""
    parts = [
        "# Public names",
        "",
        "The modules that programs may import from, old addresses included; a name stays where it is listed here.",
        "Every other module is internal, and may move in any release.",
        "",
    ]
    for address in PUBLIC_MODULES:
        module = public_module(address)
        parts += [f"## {address}", "", _first_line(module), "", "| name | what it is |", "|---|---|"]
        parts += [f"| `{name}` | {_described(getattr(module, name))} |" for name in public_names(module)] + [""]
    return "\n".join(parts)


def _described(value: object) -> str:
    """Return the first line of a class's, function's or module's docstring, and the type of anything else."""
    if isinstance(value, type) or inspect.isroutine(value) or isinstance(value, ModuleType):
        return _first_line(value)
    return f"{type(value).__name__}"


def _first_line(value: object) -> str:
    return escape((inspect.getdoc(value) or "").partition("\n")[0], quote=False).replace("|", "\\|")


def document_page(name: str) -> str:
    """A document of the repository's root as a page: its links are those of the site."""
    text = (ROOT / name).read_text()
    return re.sub(r"\]\(docs/", "](", text)


def generated() -> Iterator[tuple[str, str]]:
    """(address of the page, its markdown)."""
    yield "changelog.md", document_page("CHANGELOG.md")
    yield "contributing.md", document_page("CONTRIBUTING.md")
    yield "reference/commands.md", commands_page()
    yield "reference/settings.md", settings_page()
    yield "reference/public_names.md", public_names_page()
