"""``accelerate doctor script.py``: find how an accelerated script behaves differently on several processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...commands.parser import Subparsers, command_parser, complain_and_exit
from .verify_command import add_num_steps, runs_agree

if TYPE_CHECKING:
    from .doctor import Finding

_DESCRIPTION: Final = (
    "Read scripts with an Accelerator, and report each line that would hang, train differently or lose data on "
    "several processes. No script is run, unless --run asks to compare one process with two."
)
#: The words of GitHub's annotations for our severities.
_ANNOTATIONS: Final = {"error": "error", "warning": "warning", "note": "notice"}


def doctor_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate doctor``."""
    parser = command_parser("doctor", _DESCRIPTION, subparsers)
    parser.add_argument("scripts", type=Path, nargs="+", metavar="script", help="The Python files to read.")
    parser.add_argument("--fix", action="store_true", help="Write the cures that are safe, and show them as a diff.")
    parser.add_argument("--diff", action="store_true", help="Show the diff of --fix, and write nothing.")
    parser.add_argument(
        "--format",
        choices=("text", "github"),
        default="text",
        help="How to print findings: as text, or as annotations that GitHub shows beside the lines of a change.",
    )
    parser.add_argument(
        "--only_accelerated", action="store_true", help="Skip files that don't import accelerate, as in a commit hook."
    )
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
        Refused: a script can't be read, or doesn't use the Accelerator.
    """
    if args.run and len(args.scripts) > 1:
        message = f"--run compares the runs of one script. {len(args.scripts)} were given."
        complain_and_exit(doctor_command_parser(), message)
    faulty = [path for path in args.scripts if _has_errors(path, args)]
    agree = _ranks_agree(args) if args.run else True
    return int(bool(faulty) or not agree)


def _has_errors(path: Path, args: argparse.Namespace) -> bool:
    """Examine one script, fix it if that is asked for, and return whether an error is left."""
    from .doctor import Severity, Unaccelerated, diff, examine, fixed
    from .migrate import read_script

    text, name = read_script(path), str(path)
    try:
        after = fixed(text, name) if args.fix or args.diff else text
        findings = examine(after if args.fix else text, name)
    except Unaccelerated:
        if args.only_accelerated:
            return False
        raise
    print(diff(text, after, name), end="")
    if args.fix and after != text:
        path.write_bytes(after.encode("utf-8"))
    as_line = _as_annotation if args.format == "github" else _as_text
    for finding in findings:
        print(as_line(name, finding))
    counts = [(each.value, sum(finding.severity == each.value for finding in findings)) for each in Severity]
    if args.format == "text":
        summary = ", ".join(f"{number} {word}{'s' * (number != 1)}" for word, number in counts if number)
        print(f"{path}: {summary or 'no problems found'}.")
    return counts[0][1] > 0


def _as_text(name: str, finding: Finding) -> str:
    return f"{name}:{finding.line}: {finding.severity}: {finding.text} [{finding.code}]"


def _as_annotation(name: str, finding: Finding) -> str:
    """Return a finding as a command of GitHub's workflows."""
    properties = {"file": name, "line": str(finding.line), "title": f"accelerate doctor {finding.code}"}
    given = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    return f"::{_ANNOTATIONS[finding.severity]} {given}::{_escaped(finding.text)}"


def _escaped(text: str, more: str = "") -> str:
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _ranks_agree(args: argparse.Namespace) -> bool:
    from .verify import compare_ranks

    return runs_agree(
        "accelerate doctor",
        args,
        lambda: [compare_ranks(args.scripts[0], args.script_args, args.num_steps)],
        "Two processes train identically to one",
    )
