"""The pages that are made from the declarations themselves: commands, and every setting under each of its names."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from html import escape

from accelerate.commands.main import COMMANDS
from accelerate.settings.document import options_with_groups
from accelerate.settings.option import OptionInfo


def commands_page() -> str:
    """The help of every command, as it is printed."""
    parts = [
        "# Commands",
        "",
        "Made from the commands themselves. `accelerate COMMAND --help` prints the same.",
        "",
    ]
    for name, (module, line) in COMMANDS.items():
        option = "--help-all" if name == "launch" else "--help"
        parts += [f"## accelerate {name}", "", line, "", "```text", _printed(module, option), "```", ""]
    return "\n".join(parts)


def _printed(module: str, option: str) -> str:
    """What a command prints for its help, 100 columns wide."""
    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        importlib.import_module(f"accelerate.commands.{module}").main([option])
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
    groups: dict[str, list[OptionInfo]] = {}
    for _, option in options_with_groups():
        if option.flag or option.key or option.env:
            groups.setdefault(option.group, []).append(option)
    for title, options in groups.items():
        parts += [f"## {title}", "", "| flag, key of the file, variable | default | what it does |", "|---|---|---|"]
        parts += [_row(option) for option in options] + [""]
    return "\n".join(parts)


def _row(option: OptionInfo) -> str:
    file = ".".join(part for part in (option.section, option.key) if part) if option.key else None
    default = "" if option.launched is None else _code(str(option.launched) or '""')
    help = escape(option.help, quote=False).replace("|", "\\|")
    if option.choices:
        help += f" One of {', '.join(_code(choice) for choice in option.choices)}."
    names = "<br>".join(_code(name) for name in (option.flag, file, *option.env) if name)
    return f"| {names} | {default} | {help} |"


def _code(word: str | None) -> str:
    return f"`{word}`" if word else ""


def generated() -> Iterator[tuple[str, str]]:
    """(address of the page, its markdown)."""
    yield "reference/commands.md", commands_page()
    yield "reference/settings.md", settings_page()
