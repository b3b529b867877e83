"""``accelerate completion``: a script with which the shell completes subcommands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, cast

from ...commands.help_text import own_options
from ...commands.main import commands
from ...commands.parser import Subparsers, command_parser, spellings
from ...seams import load
from ...settings.option import OptionInfo
from ...settings.tree import launch_options_of

SHELLS: Final = ("bash", "zsh", "fish")
_SUBCOMMANDS: Final = {"config": "default update show", "completion": " ".join(SHELLS)}
_TEMPLATE: Final = """\
# Completion of the command accelerate; put this line into your shell's start-up file:
#   eval "$(accelerate completion {name})"
{prelude}_accelerate() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "$command:$before" in
{values}
  esac
  case "$command:$word" in
{flags}
{subcommands}
  esac
}}
complete -o default -F _accelerate accelerate
"""

_FISH: Final = """\
# Completion of the command accelerate; put this line into your shell's start-up file:
#   accelerate completion fish | source
complete -c accelerate -n "test (count (commandline -opc)) -eq 1" -f
"""


def script(shell: str) -> str:
    """Return the completion script for the shell."""
    return _fish() if shell == "fish" else _bash(shell)


class _Flag(NamedTuple):
    """A flag in the form that a shell needs."""

    spellings: Sequence[str]
    takes_value: bool
    choices: Sequence[str]
    help: str


def _flags() -> dict[tuple[str, ...], list[_Flag]]:
    """Return the flags by the subcommands that have them."""
    own = (*own_options(), ("--help", "", "Show this help."))
    launch = [_Flag(spellings(flag), value[:1] not in ("", "["), (), help) for flag, value, help in own]
    launch += [_Flag(row.flags, not row.switch, _choices(row), row.help) for row in launch_options_of()]
    found: dict[tuple[str, ...], list[_Flag]] = {("launch", "test"): launch}
    for name, command in commands().items():
        if name not in ("launch", "test"):
            found[name,] = list(_flags_of(load(command.parser)()))
    return found


def _flags_of(parser: argparse.ArgumentParser) -> Iterable[_Flag]:
    for action in parser._actions:
        long = [flag for flag in action.option_strings if flag.startswith("--")]
        choices = [str(choice) for choice in cast("Iterable[object]", action.choices or ())]
        if long:
            yield _Flag(long, action.nargs != 0, choices, action.help or "")


def _choices(option: OptionInfo) -> Sequence[str]:
    """Return the values of the option; () if they can't be listed."""
    return ("true", "false") if option.kind == "bool" and not option.switch else option.choices or ()


def _name(flag: _Flag) -> str:
    return next(spelling for spelling in flag.spellings if spelling.startswith("--"))


def _bash(shell: str) -> str:
    def offered(patterns: Iterable[str], words: Iterable[str], after: str = "") -> str:
        return f'    {"|".join(patterns)}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")){after} ;;'

    values: list[str] = []
    flags: list[str] = []
    for names, members in _flags().items():
        flags.append(offered([f"{name}:-*" for name in names], map(_name, members)))
        for flag in members:
            if flag.choices:
                patterns = [f"{name}:{spelling}" for name in names for spelling in flag.spellings]
                values.append(offered(patterns, flag.choices, "; return"))
    subcommands = [
        f'    {name}:*) [[ $COMP_CWORD -eq 2 ]] && COMPREPLY=($(compgen -W "{arguments}" -- "$word")) ;;'
        for name, arguments in _SUBCOMMANDS.items()
    ]
    return _TEMPLATE.format(
        name=shell,
        prelude="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(commands()),
        values="\n".join(values),
        flags="\n".join(flags),
        subcommands="\n".join(subcommands),
    )


def _fish() -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def after(names: str) -> str:
        return f'complete -c accelerate -n "__fish_seen_subcommand_from {names}"'

    first = 'complete -c accelerate -n "test (count (commandline -opc)) -eq 1"'
    lines = [f"{first} -a {name} -d {quoted(command.help)}" for name, command in commands().items()]
    lines += [f"{after(name)} -f -a {quoted(arguments)}" for name, arguments in _SUBCOMMANDS.items()]
    for names, members in _flags().items():
        for flag in members:
            choices = f" -x -a {quoted(' '.join(flag.choices))}" if flag.choices else " -r"
            value = choices if flag.takes_value else ""
            lines.append(f"{after(' '.join(names))} -l {_name(flag)[2:]}{value} -d {quoted(flag.help)}")
    return _FISH + "\n".join(lines) + "\n"


def completion_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate completion``."""
    description = (
        'Print a completion script: eval "$(accelerate completion bash)" or accelerate completion fish | source.'
    )
    parser = command_parser("completion", description, subparsers)
    parser.add_argument("shell", choices=SHELLS, help="The shell.")
    parser.set_defaults(func=completion_command)
    return parser


def completion_command(args: argparse.Namespace) -> None:
    """Print the completion script."""
    print(script(args.shell), end="")
