"""``accelerate config`` and its subcommands: ask, default, update, show."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ...errors import SettingError
from ...launch.arguments import flags_of
from ...settings import file
from ...settings.tree import Settings
from ..parser import WHICH_FILE, Subparsers, command_parser, configuration_path, run_command, spellings
from . import config_args
from .ask import Asker
from .config_args import default_config_file, load_config_from_file
from .default import default_command_parser
from .questions import Questionnaire

__all__ = [
    "config_args",
    "config_command_parser",
    "default_command_parser",
    "default_config_file",
    "load_config_from_file",
    "get_config_parser",
    "main",
    "update_command_parser",
]


def update_config(path: str | Path | None = None) -> Path:
    """Load the file, write it again in today's spelling, and return its path."""
    target = configuration_path(path, must_exist=True)
    file.save(file.load(target), target)
    return target


def update_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config update``."""
    parser = command_parser(
        "config update", "Rewrite a configuration file in today's spelling, with today's defaults.", subparsers
    )
    parser.add_argument(*spellings("--config_file"), default=None, help=f"The file to update. {WHICH_FILE}")
    parser.set_defaults(func=update_config_command)
    return parser


def update_config_command(args: argparse.Namespace) -> None:
    """Update the file and print its path."""
    print(f"Updated the configuration at {update_config(args.config_file)}")


def show_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config show``."""
    parser = command_parser(
        "config show", "Print a configuration file, and every value that a launch would take from it.", subparsers
    )
    parser.add_argument(*spellings("--config_file"), help=f"The file to show. {WHICH_FILE}")
    parser.set_defaults(func=show_config_command)
    return parser


def show_config_command(args: argparse.Namespace) -> None:
    """Print the file and the settings that a launch would take from it."""
    path = configuration_path(args.config_file, must_exist=True)
    print(f"# {path}\n{path.read_text().rstrip()}\n")
    print(file.load(path).explain())


_SUBCOMMANDS: Final[dict[str, Callable[[], argparse.ArgumentParser]]] = {
    "default": default_command_parser,
    "update": update_command_parser,
    "show": show_command_parser,
}
_EPILOG: Final = """\
subcommands:
  default   write a configuration for this machine, without questions
  update    rewrite a configuration in today's spelling
  show      print a configuration, and the launch's values from it
"""


def config_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config``."""
    description = "Answer a few questions about this machine; `accelerate launch` then needs no flags."
    parser = command_parser("config", description, subparsers, epilog=_EPILOG)
    parser.add_argument(*spellings("--config_file"), help=f"The file to write. {WHICH_FILE}")
    parser.add_argument("--advanced", action="store_true", help="Ask everything.")
    parser.set_defaults(func=config_command)
    return parser


def get_config_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config`` with its subcommands."""
    parser = config_command_parser(subparsers)
    commands = parser.add_subparsers(dest="subcommand", title="subcommands", parser_class=argparse.ArgumentParser)
    default_command_parser(commands)
    update_command_parser(commands)
    show_command_parser(commands)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask the questions, write the file, and show it and the command to run."""
    path = configuration_path(args.config_file)
    _check_writable(path)
    asker = Asker()
    settings = Questionnaire(asker, args.advanced, _old_answers(path, asker)).run()
    file.save(settings, path)
    asker.write_line(f"\nThe configuration is at {path}:\n\n{path.read_text().rstrip()}\n")
    named = "" if args.config_file is None else f" --config_file {path}"
    asker.write_line(f"Run a script with it:\n\n  accelerate launch{named} script.py")
    if settings.sagemaker is None:
        flags = shlex.join(flags_of(settings))
        asker.write_line(f"\nor, on a machine without this file:\n\n  accelerate launch {flags} script.py")


def _old_answers(path: Path, asker: Asker) -> Settings:
    """Return the settings of the file to replace; if it can't be read, say so and return none."""
    if not path.is_file():
        return Settings()
    try:
        old = file.load(path)
    except SettingError as error:
        asker.write_line(f"The answers in {path} aren't proposed, because it can't be read: {error}")
        return Settings()
    asker.write_line(f"What {path} says is proposed.")
    return old


def _check_writable(path: Path) -> None:
    """Raise unless the file can be written, before the questions are asked."""
    if path.is_dir():
        raise SettingError(f"{path} is a folder: give the name of a file with --config_file.")
    existing = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    if not (existing == path or existing.is_dir()) or not os.access(existing, os.W_OK):
        raise SettingError(
            f"{path} can't be written ({existing} is in the way). Give another place with --config_file."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate config`` and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    create = _SUBCOMMANDS.get(argv[0]) if argv else None
    try:
        return run_command(config_command_parser(), argv) if create is None else run_command(create(), argv[1:])
    except KeyboardInterrupt:
        print("\nNothing was written.", file=sys.stderr)
        return 130
