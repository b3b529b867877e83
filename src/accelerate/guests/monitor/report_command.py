"""``accelerate report RUN``: how the time of a run was spent, over all its starts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands.parser import Subparsers, command_parser, run_command
from ...errors import SettingError

if TYPE_CHECKING:
    from .document import Hours

_DESCRIPTION = (
    "Say where the hours of a run went: steps, waiting for data, saving, starting, repeated steps after a "
    "restart, and the time until it. A run keeps a ledger if it is started with `accelerate launch --monitor`, or its "
    "script calls `run = accelerator.watch_run()` and `run.step(loss)`."
)


def report_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate report``."""
    parser = command_parser("report", _DESCRIPTION, subparsers)
    parser.add_argument("run", type=Path, help="The project's folder: the run's Accelerator(project_dir=...).")
    parser.add_argument("--json", action="store_true", help="Print an object for programs.")
    parser.set_defaults(func=report_command)
    return parser


def report_command(args: argparse.Namespace) -> int:
    """Print the table and return 0.

    Raises:
        SettingError: the folder doesn't exist, or has no ledger.
    """
    from .hours import hours

    if not args.run.is_dir():
        raise SettingError(
            f"{args.run} is {'not a folder' if args.run.exists() else 'not there'}. Give the project's folder: what "
            "Accelerator(project_dir=...) of the run says."
        )
    found = hours(args.run)
    if found is None:
        raise SettingError(
            f"{args.run} has no ledger of hours (monitor/ledger). A run keeps one in its project's folder if it "
            "is started with `accelerate launch --monitor`, or its script calls `run = accelerator.watch_run()`."
        )
    print(json.dumps(found, indent=2) if args.json else table(found))
    return 0


def table(found: Hours) -> str:
    """Return the hours as readable lines, without kinds that took no time."""
    from ...watching import format_duration
    from .hours import KINDS, LOST

    wall = found["wall_seconds"]
    starts = f"{found['starts']} start{'s' * (found['starts'] != 1)}"
    lines = [f"{found['updates']:,} updates, {starts}, {format_duration(wall)} wall-clock time"]
    lines += ["", f"{'':<22}{'hours':>10}{'time':>12}{'%':>8}"]
    for kind, words in KINDS.items():
        spent = found["seconds"].get(kind, 0.0)
        if spent > 0:
            more = f"   {found['lost_updates']:,} updates" if kind == LOST else ""
            lines.append(f"{words:<22}{_row(spent, wall)}{more}")
    lines.append(f"{'total':<22}{_row(sum(found['seconds'].values()), wall)}")
    lines += ["", f"goodput {found['goodput']:.1%}: share of the total time in steps that were kept"]
    return "\n".join(lines)


def _row(seconds: float, wall: float) -> str:
    from ...watching import format_duration

    return f"{seconds / 3600:>10.3f}{format_duration(seconds):>12}{seconds / wall if wall else 0.0:>8.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate report`` and return its exit code."""
    return run_command(report_command_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
