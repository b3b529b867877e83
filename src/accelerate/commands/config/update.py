"""``accelerate config update``: an old configuration file in today's spelling, with today's defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...settings import file
from ..parser import Parser, spellings


def update_config(path: str | Path | None = None) -> Path:
    """The path of the file, which has been read and written again."""
    target = Path(file.default_config_file() if path is None else path).expanduser()
    if not target.is_file():
        raise FileNotFoundError(f"There is no configuration at {target}. `accelerate config` writes one.")
    file.save(file.load(target), target)
    return target


def update_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of ``accelerate config update``."""
    description = "Rewrite a configuration file in today's spelling, with today's defaults."
    if subparsers is not None:
        parser = subparsers.add_parser("update", description=description, allow_abbrev=False)
    else:
        parser = Parser(prog="accelerate config update", description=description)
    parser.add_argument(*spellings("--config_file"), default=None, dest="config_file", help="The file to update.")
    parser.set_defaults(func=update_config_command)
    return parser


def update_config_command(args: argparse.Namespace) -> None:
    """The file has been updated, and its path has been printed."""
    print(f"Updated the configuration at {update_config(args.config_file)}")
