"""``accelerate migrate script.py``: convert a plain PyTorch script to use the Accelerator, and show a diff."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...commands.parser import Subparsers, command_parser, spellings
from .verify_command import add_num_steps, runs_agree

if TYPE_CHECKING:
    from .migrate import Migration

_DESCRIPTION: Final = (
    "Turn a raw PyTorch script (for one device, or distributed by hand) into one that runs on any number of processes. "
    "The changes are shown as a diff, each with its reason, with what was left alone; nothing is written unasked."
)


def migrate_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate migrate``."""
    parser = command_parser("migrate", _DESCRIPTION, subparsers)
    parser.add_argument("script", type=Path, help="The Python file to change.")
    parser.add_argument("--write", action="store_true", help="Write the changes into the script without asking.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Write the changed script to FILE instead.")
    parser.add_argument("--diff", action="store_true", help="Print the bare diff only, for `git apply` or `patch`.")
    parser.add_argument(
        *spellings("--keep_batch"),
        action="store_true",
        help="Keep the script's global batch: N processes take 1/N of each batch. Without it, each process takes "
        "batches of the script's size, so N processes take N times as many samples in a step.",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="Train some steps with the script and with the changed one, on 1 and on 2 processes of the CPU, show the "
        "losses side by side, and write nothing unless they agree. The script's arguments follow after --.",
    )
    add_num_steps(parser)
    parser.set_defaults(func=migrate_command, script_args=[])
    return parser


def migrate_command(args: argparse.Namespace) -> int:
    """Show the changes, write them if requested or accepted, and return 0 unless they were declined.

    Raises:
        Refused: the script can't be changed, or is accelerated already.
    """
    from .migrate import migrate, read_script

    found = migrate(read_script(args.script), str(args.script), keep_batch=args.keep_batch)
    if args.diff:
        print(found.diff(), end="")
    else:
        print(shown(found, colored=sys.stdout.isatty()))
        print("\n".join(["", *_left(found)]))
    if args.verify and not _agree(found, args):
        return 1
    target = args.output or args.script
    if not (args.write or args.output):
        if args.diff or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return 0
        if input(f"\nWrite this to {target}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("Nothing was written.")
            return 1
    target.write_bytes(found.after.encode("utf-8"))
    if not args.diff:
        print(f"\nWritten to {target}. Run it with `accelerate launch {target}`.")
    return 0


def _left(found: Migration) -> list[str]:
    """Return what `accelerate doctor` says about the changed script, as lines."""
    from .doctor import Severity, examine

    findings = [each for each in examine(found.after, found.name) if each.severity != Severity.NOTE.value]
    if not findings:
        return ["`accelerate doctor` finds no problems in the changed script."]
    lines = [f"  line {each.line}: {each.severity}: {each.text}" for each in findings]
    return ["`accelerate doctor` on the changed script (its lines):", *lines]


def _agree(found: Migration, args: argparse.Namespace) -> bool:
    """Compare runs of the script and its conversion, show the result, and return whether they train identically."""
    from .verify import verify

    return runs_agree(
        "accelerate migrate",
        args,
        lambda: verify(found, args.script, args.script_args, args.num_steps),
        "The converted script trains identically",
        "The converted script doesn't train identically; nothing was written.",
        aside=args.diff,
    )


def shown(found: Migration, *, colored: bool = False) -> str:
    """Return the diff, the reasons and the notes as text."""
    red, green, dim, plain = ("\033[31m", "\033[32m", "\033[2m", "\033[0m") if colored else ("", "", "", "")
    lines: list[str] = []
    for line in found.diff().splitlines():
        tone = green if line.startswith("+") else red if line.startswith("-") else dim if line.startswith("@@") else ""
        lines.append(f"{tone}{line}{plain}" if tone else line)
    lines += ["", "Why:"]
    reasons: dict[str, list[int]] = {}
    for line, why in found.changes:
        reasons.setdefault(why, []).append(line)
    for why, places in reasons.items():
        lines.append(f"  line {', '.join(map(str, dict.fromkeys(places)))}: {why}")
    if found.notes:
        lines += ["", "Not changed, please review:"]
        lines += [f"  {found.name}:{note.line}: {note.text}" for note in found.notes]
    return "\n".join(lines)
