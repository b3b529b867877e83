"""``accelerate config update``: an old configuration file in today's spelling, with today's defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...settings import file
from ..parser import WHICH_FILE, Subparsers, command_parser, configuration_path, spellings


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
