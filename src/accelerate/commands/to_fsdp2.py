"""``accelerate to-fsdp2``: a configuration file for FSDP version 1 as one for version 2."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from .parser import WHICH_FILE, Subparsers, command_parser, configuration_path, run_command, spellings

_RESHARDS: Final[Mapping[str, bool]] = {
    "FULL_SHARD": True,
    "HYBRID_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
#: The old numbers of the strategies, from 1.
_NUMBERED: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
#: Options that version 2 has no use for, and why.
_DROPPED: Final[Mapping[str, str]] = {
    "fsdp_backward_prefetch": "version 2 always prefetches in the backward pass",
    "fsdp_sync_module_states": "version 2 broadcasts with fsdp_cpu_ram_efficient_loading",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
    "fsdp_forward_prefetch": "version 2 prefetches by itself",
}


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
        elif name in _DROPPED:
            print(f"{name} is left out: {_DROPPED[name]}.", file=sys.stderr)
        else:
            renewed[name] = value
    renewed["fsdp_version"] = 2
    converted["fsdp_config"] = renewed
    return converted


def _reshards(strategy: object) -> bool:
    name = str(strategy).upper()
    if name.isdigit() and 1 <= int(name) <= len(_NUMBERED):
        name = _NUMBERED[int(name) - 1]
    if name not in _RESHARDS:
        raise SettingError(f"fsdp_sharding_strategy is {strategy!r}; it can be converted from {', '.join(_RESHARDS)}.")
    return _RESHARDS[name]


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
    content = yaml.safe_load(source.read_text(encoding="utf-8"))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(content)), encoding="utf-8")
    print(f"The configuration for FSDP version 2 is at {target}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate to-fsdp2`` and return its exit code."""
    return run_command(to_fsdp2_command_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
