"""``accelerate config update``: an old configuration file in today's spelling, with today's defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...settings import file
from ..parser import Parser, spellings


def update_config(path: str | Path | None = None) -> Path:
    """Load the file, write it again in today's spelling, and return its path."""
    target = Path(file.default_config_file() if path is None else path).expanduser()
    if not target.is_file():
        raise FileNotFoundError(f"There is no configuration at {target}. `accelerate config` writes one.")
    file.save(file.load(target), target)
    return target


def update_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config update``."""
    description = "Rewrite a configuration file in today's spelling, with today's defaults."
    if subparsers is not None:
        parser = subparsers.add_parser("update", description=description, allow_abbrev=False)
    else:
        parser = Parser(prog="accelerate config update", description=description)
    parser.add_argument(*spellings("--config_file"), default=None, dest="config_file", help="The file to update.")
    parser.set_defaults(func=update_config_command)
    return parser


def update_config_command(args: argparse.Namespace) -> None:
    """Update the file and print its path."""
    print(f"Updated the configuration at {update_config(args.config_file)}")
