"""``accelerate config default``: a configuration file from what this machine has, without questions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from ...devices.table import CPU, present
from ...errors import SettingError
from ...settings import file
from ...settings.option import Source
from ...settings.run import collect
from ...settings.run_options import PRECISIONS
from ...settings.tree import Settings
from ..parser import WHICH_FILE, Subparsers, command_parser, configuration_path, spellings


def detected(mixed_precision: str) -> Settings:
    """Return settings for the devices of this machine."""
    kind, count = present()
    num_devices = 0 if kind is CPU else count
    source = Source("file", "this machine")
    values: dict[str, object] = {
        "launch.distributed_type": kind.label if num_devices > 1 else "NO",
        "run.mixed_precision": mixed_precision,
        "launch.num_processes": max(1, num_devices),
        "run.use_cpu": num_devices == 0,
    }
    return collect({}, {}, file={name: (value, source) for name, value in values.items()})


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | Literal[False]:
    """Write a configuration file for this machine and return its path; False where there is one already.

    Raises:
        ValueError: the precision is unknown.
    """
    precision = mixed_precision.lower()
    if precision not in PRECISIONS:
        raise SettingError(
            f"write_basic_config(mixed_precision={mixed_precision!r}): give one of {', '.join(PRECISIONS)}."
        )
    path = configuration_path(save_location)
    if path.exists():
        print(f"There is a configuration at {path} already. Remove it first, or run `accelerate config` to replace it.")
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.save(detected(precision), path)
    except OSError as error:
        raise SettingError(f"{path} can't be written: {error.strerror}. Give another place.") from error
    return path


def default_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate config default``."""
    parser = command_parser("config default", "Write a configuration file from what this machine has.", subparsers)
    parser.add_argument(*spellings("--config_file"), default=None, help=f"The file to write. {WHICH_FILE}")
    parser.add_argument(*spellings("--mixed_precision"), default="no", choices=PRECISIONS, help="The precision.")
    parser.set_defaults(func=default_config_command)
    return parser


def default_config_command(args: argparse.Namespace) -> None:
    """Write the file and print its path, or that an existing one was kept."""
    path = write_basic_config(args.mixed_precision, args.config_file)
    if path is not False:
        print(f"The configuration is at {path}")
