"""``accelerate config show``: the configuration file as it is, and what a launch would make of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...settings import file
from ..parser import Parser, spellings


def show_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config show``."""
    description = "Print a configuration file, and every value that a launch would take from it."
    if subparsers is not None:
        parser = subparsers.add_parser("show", description=description, allow_abbrev=False)
    else:
        parser = Parser(prog="accelerate config show", description=description)
    parser.add_argument(*spellings("--config_file"), default=None, dest="config_file", help="The file to show.")
    parser.set_defaults(func=show_config_command)
    return parser


def show_config_command(args: argparse.Namespace) -> None:
    """Print the file and the settings that a launch would take from it."""
    path = Path(file.default_config_file() if args.config_file is None else args.config_file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no configuration at {path}. `accelerate config` writes one.")
    print(f"# {path}\n{path.read_text().rstrip()}\n")
    print(file.load(path).explain())
