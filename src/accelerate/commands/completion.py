"""``accelerate completion``: a script that lets the shell complete subcommands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from ..settings.option import OptionInfo
from ..settings.run import launch_options_of
from .parser import Subparsers, command_parser

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
    launch:-*|test:-*) COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;
{subcommands}
  esac
}}
complete -o default -F _accelerate accelerate
"""


_OWN: Final = ("--config_file", "--explain", "--dry-run", "--help", "--help-all")
_FISH: Final = """\
# Completion of the command accelerate; put this line into your shell's start-up file:
#   accelerate completion fish | source
complete -c accelerate -n "test (count (commandline -opc)) -eq 1" -f
"""


def script(shell: str) -> str:
    """Return the completion script for the shell."""
    return _fish() if shell == "fish" else _bash(shell)


def _choices(option: OptionInfo) -> Sequence[str]:
    """Return the values that the option can have, () where they can't be listed."""
    return ("true", "false") if option.kind == "bool" and not option.switch else option.choices or ()


def _bash(shell: str) -> str:
    from .main import COMMANDS

    values: list[str] = []
    for option in launch_options_of():
        if choices := _choices(option):
            pattern = "|".join(f"launch:{flag}" for flag in option.flags)
            values.append(f'    {pattern}) COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word")); return ;;')
    subcommands = [
        f'    {name}:*) [[ $COMP_CWORD -eq 2 ]] && COMPREPLY=($(compgen -W "{arguments}" -- "$word")) ;;'
        for name, arguments in _SUBCOMMANDS.items()
    ]
    return _TEMPLATE.format(
        name=shell,
        prelude="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        values="\n".join(values),
        flags=" ".join([*_OWN, *(str(option.flag) for option in launch_options_of())]),
        subcommands="\n".join(subcommands),
    )


def _fish() -> str:
    from .main import COMMANDS

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    first = 'complete -c accelerate -n "test (count (commandline -opc)) -eq 1"'
    lines = [f"{first} -a {name} -d {quoted(help)}" for name, (_, help) in COMMANDS.items()]
    for name, arguments in _SUBCOMMANDS.items():
        lines.append(f'complete -c accelerate -n "__fish_seen_subcommand_from {name}" -f -a {quoted(arguments)}')
    launch = 'complete -c accelerate -n "__fish_seen_subcommand_from launch test"'
    lines += [f"{launch} -l {flag[2:]}{' -r' if flag == '--config_file' else ''}" for flag in _OWN]
    for option in launch_options_of():
        choices = _choices(option)
        value = "" if option.switch else f" -x -a {quoted(' '.join(choices))}" if choices else " -r"
        lines.append(f"{launch} -l {str(option.flag)[2:]}{value} -d {quoted(option.help)}")
    return _FISH + "\n".join(lines) + "\n"


def completion_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate completion``."""
    description = (
        'Print a completion script: eval "$(accelerate completion bash)" or accelerate completion fish | source.'
    )
    parser = command_parser("completion", description, subparsers)
    parser.add_argument("shell", choices=SHELLS, help="The shell.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the completion script and return 0."""
    args = completion_command_parser().parse_args(None if arguments is None else list(arguments))
    print(script(args.shell), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
