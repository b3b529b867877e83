"""``accelerate to-fsdp2``: a configuration file for FSDP version 1 as one for version 2."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..settings.fsdp import FSDP_SHARDING_STRATEGY, HYBRID_IN_VERSION_2, ONLY_VERSION_1, RESHARDS
from .config.config_args import content_of
from .parser import WHICH_FILE, Subparsers, command_parser, configuration_path, run_command, spellings


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the file's content for version 2, and print which options are left out."""
    converted = copy.deepcopy(dict(config))
    section = converted.get("fsdp_config")
    if not section:
        raise SettingError("This configuration has no fsdp_config, so there is nothing to convert.")
    if int(section.get("fsdp_version", 1)) == 2:
        print("This configuration is for FSDP version 2 already.", file=sys.stderr)
        return converted
    renewed: dict[str, object] = {}
    for name, value in section.items():
        if name == "fsdp_sharding_strategy":
            renewed["fsdp_reshard_after_forward"] = _reshards(value)
        elif (why := ONLY_VERSION_1.get(name.removeprefix("fsdp_"))) is not None:
            print(f"{name} is left out: {why}.", file=sys.stderr)
        else:
            renewed[name] = value
    renewed["fsdp_version"] = 2
    converted["fsdp_config"] = renewed
    return converted


def _reshards(strategy: object) -> bool:
    """Return ``reshard_after_forward`` for the strategy; print the differences of version 2."""
    names, name = FSDP_SHARDING_STRATEGY, str(strategy).upper()
    if name.isdigit() and 1 <= int(name) <= len(names):
        name = names[int(name) - 1]
    if name not in names:
        raise SettingError(f"fsdp_sharding_strategy is {strategy!r}; it can be converted from {', '.join(names)}.")
    if name == "NO_SHARD":
        print(
            "fsdp_sharding_strategy is NO_SHARD, but version 2 always shards: use DDP to train without sharding.",
            file=sys.stderr,
        )
    elif name.startswith("HYBRID"):
        print(f"fsdp_sharding_strategy is {name}. {HYBRID_IN_VERSION_2}.", file=sys.stderr)
    return RESHARDS.get(name, False)


def to_fsdp2_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate to-fsdp2``."""
    parser = command_parser("to-fsdp2", "Convert a configuration file from FSDP version 1 to version 2.", subparsers)
    parser.add_argument(*spellings("--config_file"), default=None, help=f"The file to convert. {WHICH_FILE}")
    parser.add_argument("--overwrite", action="store_true", help="Write the result into the same file.")
    parser.add_argument(*spellings("--output_file"), default=None, help="The file to write.")
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert the configuration and write it to the file that was named for it."""
    import yaml

    source = configuration_path(args.config_file, must_exist=True)
    named: str | None = args.output_file
    if named is None and not args.overwrite:
        raise SettingError("Where shall the result go? Give --output_file FILE, or --overwrite.")
    target = source if args.overwrite or named is None else Path(named).expanduser()
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"{target} exists already. Give --overwrite, or name another --output_file.")
    content = content_of(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(content)), encoding="utf-8")
    print(f"The configuration for FSDP version 2 is at {target}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate to-fsdp2`` and return its exit code."""
    return run_command(to_fsdp2_command_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
