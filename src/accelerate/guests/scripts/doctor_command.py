"""``accelerate doctor script.py``: find how an accelerated script behaves differently on several processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...commands.parser import Subparsers, command_parser, run_with_script_arguments
from .options import add_num_steps, read_script, runs_agree

_DESCRIPTION: Final = (
    "Read a script with an Accelerator, and report each line that would hang, train differently or lose data on "
    "several processes. The script isn't run, unless --run asks to compare one process with two."
)


def doctor_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate doctor``."""
    parser = command_parser("doctor", _DESCRIPTION, subparsers)
    parser.add_argument("script", type=Path, help="The Python file to read.")
    parser.add_argument(
        "--run",
        action="store_true",
        help="Also train some steps on 1 process and on 2 that share each batch, on the CPU, and compare the losses. "
        "The script's arguments follow after --.",
    )
    add_num_steps(parser)
    parser.set_defaults(func=doctor_command, script_args=[])
    return parser


def doctor_command(args: argparse.Namespace) -> int:
    """Print the findings and return 1 if one of them is an error, else 0.

    Raises:
        Refused: the script can't be read, or doesn't use the Accelerator.
    """
    from .doctor import Severity, examine

    findings = examine(read_script(args.script), str(args.script))
    for finding in findings:
        print(f"{args.script}:{finding.line}: {finding.severity}: {finding.text}")
    counts = [(each.value, sum(finding.severity == each.value for finding in findings)) for each in Severity]
    summary = ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in counts if number)
    print(f"{args.script}: {summary or 'no problems found'}.")
    agree = _ranks_agree(args) if args.run else True
    return int(counts[0][1] > 0 or not agree)


def _ranks_agree(args: argparse.Namespace) -> bool:
    from .verify import compare_ranks

    return runs_agree(
        "accelerate doctor",
        args,
        lambda: [compare_ranks(args.script, args.script_args, args.num_steps)],
        "Two processes train identically to one",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate doctor`` and return its exit code; 2 if the script can't be read."""
    try:
        return run_with_script_arguments(doctor_command_parser(), arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
