"""The help of all commands, in one style: a flag, its argument, its effect, and its default in brackets."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final, cast

from ..seams import launch_flags
from ..settings.option import OptionInfo

_COMMON: Final = """
    --config_file --num_processes --num_machines --mixed_precision --cpu --multi_gpu --tpu --gpu_ids
    --machine_rank --main_process_ip --main_process_port --max_restarts --launcher --use_deepspeed --use_fsdp
    --use_megatron_lm --num_cpu_threads_per_process --dynamo_backend --log_dir --tee --module --debug
    --preflight --pretend --monitor --explain --dry-run --help-all
"""
#: The options of the launcher's short help, in this order; all others are in ``--help-all`` only.
COMMON: Final = tuple(_COMMON.split())

#: Options of the launcher itself: (flag, value shown, help).
OWN: Final = (
    ("--config_file", "FILE", "The configuration to use; without it, the one that `accelerate config` wrote."),
    ("--explain", "", "Print each value and its source; start nothing."),
    ("--dry-run", "", "Print what would be run, and start nothing."),
    ("--nproc_per_node", "N", "torchrun's count: the processes of one machine instead of all; auto: one per device."),
    ("--help-all", "", "Show every option."),
    ("--fp16", "", "Old spelling of --mixed_precision fp16."),
)


def own_options() -> tuple[tuple[str, str, str], ...]:
    """Return the options of the launcher itself, and those that guests add: (flag, value shown, help)."""
    return (*OWN, *((row.flag, row.value, row.help) for row in launch_flags()))


_SPELLINGS: Final = "Every option can be spelled with _ or with -."
_USAGE: Final = f"""\
Usage: accelerate launch [options] script.py [arguments of the script]
       accelerate launch [options] -m module [arguments of the module]

Starts a program on one process or many. What isn't given comes from the configuration file, then from the
environment. {_SPELLINGS}
"""
_COLUMN: Final = 34
_LONGEST_CHOICES: Final = 30


def _width() -> int:
    return min(110, max(70, shutil.get_terminal_size((100, 24)).columns))


def _lines(flag: str, value: str, help: str, width: int) -> list[str]:
    head = f"  {flag} {value}".replace(" [=", "[=").rstrip()
    body = textwrap.wrap(help, max(30, width - _COLUMN))
    if len(head) >= _COLUMN - 1:
        return [head, *(" " * _COLUMN + line for line in body)]
    first, *others = body or [""]
    return [f"{head:<{_COLUMN}}{first}".rstrip(), *(" " * _COLUMN + line for line in others)]


# ---------------------------------------------------------------------------------------------------- the launcher


def _value(option: OptionInfo) -> str:
    if option.switch:
        return ""
    if option.choices is not None and len(option.choices) <= 4:
        return "{" + ",".join(option.choices) + "}"
    placeholders = {"int": "N", "float": "X", "bool": "{true,false}", "list": "A,B", "document": "FILE"}
    return placeholders.get(option.kind, "TEXT")


def _described(option: OptionInfo) -> tuple[str, str, str]:
    short = next((flag for flag in option.flags if not flag.startswith("--")), "")
    name = f"{option.flag}, {short}" if short else str(option.flag)
    default = "" if option.switch or option.launched in (None, "") else f" [{option.write(option.launched)}]"
    return name, _value(option), f"{option.help}{default}"


def short_help(options: Sequence[OptionInfo]) -> str:
    """Return the help of the options that most runs need."""
    rows = {str(option.flag): _described(option) for option in options}
    rows.update({flag: (flag, value, help) for flag, value, help in own_options()})
    width = _width()
    lines = [_USAGE]
    for flag in COMMON:
        if flag in rows:
            lines += _lines(*rows[flag], width)
    lines.append(f"\n{len(rows) - sum(flag in rows for flag in COMMON)} more options: accelerate launch --help-all")
    return "\n".join(lines)


def full_help(options: Sequence[OptionInfo]) -> str:
    """Return the help of all options, by group."""
    width = _width()
    lines = [_USAGE, "This command"]
    for row in own_options():
        lines += _lines(*row, width)
    groups: dict[str, list[OptionInfo]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    for title, members in groups.items():
        lines += ["", title]
        for option in members:
            lines += _lines(*_described(option), width)
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- the other commands


def command_help(parser: argparse.ArgumentParser) -> str:
    """Return the help of a command: how it is called, what it does, its arguments and its options."""
    width = _width()
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    arguments = [action for action in actions if not action.option_strings]
    options = [action for action in actions if action.option_strings]
    words = [f"{_flag(action)} {_placeholder(action)}" for action in options if action.required]
    words += ["[options]", *(_placeholder(action) for action in arguments)]
    lines = [f"Usage: {parser.prog} {' '.join(words)}", ""]
    lines += textwrap.wrap(parser.description or "", width)
    options.sort(key=lambda action: action.dest == "help")
    for group in (arguments, options):
        rows = [_row(action) for action in group if action.nargs != argparse.PARSER]
        lines += ["", *(line for row in rows for line in _lines(*row, width))] if rows else []
    if any("_" in _flag(action) for action in options):
        lines += ["", _SPELLINGS]
    if parser.epilog:
        lines += ["", *parser.epilog.rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def _flag(action: argparse.Action) -> str:
    return next((flag for flag in action.option_strings if flag.startswith("--")), "")


def _row(action: argparse.Action) -> tuple[str, str, str]:
    if action.dest == "help":
        return "--help", "", "Show this help."
    help = action.help or ""
    choices = [str(choice) for choice in cast("Iterable[object]", action.choices or ())]
    if choices and _written(action) is None:
        help = f"{help} One of {', '.join(choices)}."
    default = action.default
    shown = " ".join(map(str, cast("list[object]", default))) if isinstance(default, list) else default
    if action.option_strings and action.nargs != 0 and shown not in (None, "", argparse.SUPPRESS):
        help = f"{help} [{shown}]"
    placeholder = _placeholder(action)
    return (_flag(action), placeholder, help) if action.option_strings else (placeholder, "", help)


def _written(action: argparse.Action) -> str | None:
    """Return the choices as a placeholder, or None where there are none or too many."""
    choices = [str(choice) for choice in cast("Iterable[object]", action.choices or ())]
    written = "{" + ",".join(choices) + "}"
    return written if choices and len(written) <= _LONGEST_CHOICES else None


def _placeholder(action: argparse.Action) -> str:
    """Return what stands for the action's value."""
    if action.nargs == 0:
        return ""
    if action.nargs == argparse.PARSER:
        return "[subcommand]"
    value = str(action.metavar) if action.metavar else _written(action)
    if value is None and not action.option_strings:
        value = action.dest.upper()
    elif value is None:
        is_number = isinstance(action.default, (int, float)) or action.type is int
        value = "N" if is_number else "FILE" if action.dest.endswith("file") else "TEXT"
    return f"{value} ..." if action.nargs == "+" else value
