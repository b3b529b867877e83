"""``accelerate completion``: a script that lets the shell complete subcommands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from ..settings.run import launch_options_of
from .parser import Subparsers, command_parser

SHELLS: Final = ("bash", "zsh")
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


def script(shell: str) -> str:
    """Return the completion script for the shell."""
    from .main import COMMANDS

    values: list[str] = []
    flags: list[str] = ["--config_file", "--explain", "--dry-run", "--help", "--help-all"]
    for option in launch_options_of():
        flags.append(str(option.flag))
        choices = ("true", "false") if option.kind == "bool" and not option.switch else option.choices
        if choices:
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
        flags=" ".join(flags),
        subcommands="\n".join(subcommands),
    )


def completion_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate completion``."""
    parser = command_parser("completion", 'Print a completion script: eval "$(accelerate completion bash)"', subparsers)
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the completion script and return 0."""
    args = completion_command_parser().parse_args(None if arguments is None else list(arguments))
    print(script(args.shell), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
