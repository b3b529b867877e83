"""``accelerate merge-weights``: the sharded weights of a checkpoint in one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .parser import Subparsers, command_parser, run_command, spellings


def merge_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate merge-weights``."""
    parser = command_parser("merge-weights", "Merge the sharded weights of a checkpoint into one file.", subparsers)
    parser.add_argument("checkpoint_directory", help="The folder with the sharded weights.")
    parser.add_argument("output_path", help="The folder for the merged weights.")
    parser.add_argument(
        *spellings("--unsafe_serialization"),
        action="store_true",
        help="Write pytorch_model.bin instead of model.safetensors.",
    )
    parser.add_argument(
        *spellings("--remove_checkpoint_dir"),
        action="store_true",
        help="Remove the sharded weights after they are merged.",
    )
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights into the output folder and print the path.

    Raises:
        CheckpointError: they can't be merged; nothing is removed then.
    """
    from ..checkpointing import merge_fsdp_weights

    path = merge_fsdp_weights(
        args.checkpoint_directory,
        args.output_path,
        safe_serialization=not args.unsafe_serialization,
        remove_checkpoint_dir=args.remove_checkpoint_dir,
    )
    print(f"The weights of {args.checkpoint_directory} are in {path}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate merge-weights`` and return its exit code."""
    return run_command(merge_command_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
