"""``accelerate verify script.py``: train some updates as one process and in layouts, and say what differs.

Other commands that train with a script take the number of updates and the comparison of runs from here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...commands.parser import Subparsers, command_parser, count, spellings
from ...wording import by_number

if TYPE_CHECKING:
    from .verify import Comparison

_DESCRIPTION: Final = (
    "Train some updates with a script as one process, then in layouts: more processes, sharded, in micro-batches, "
    "stopped and resumed. Say for each whether it trains the same, and if not, the first difference. All runs use the "
    "CPU, without dropout, and write nothing of the script's. The script's arguments follow after --."
)


def verify_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate verify``."""
    parser = command_parser("verify", _DESCRIPTION, subparsers)
    parser.add_argument("script", type=Path, nargs="?", help="The Python file to run.")
    add_num_steps(parser)
    parser.add_argument("--layouts", metavar="NAMES", help="The layouts to run, separated by commas; without it, all.")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        help="The dtype to compute in; without it, float64 if the script allows it, else its own.",
    )
    parser.add_argument(
        *spellings("--same_bits"),
        action="store_true",
        help="Compute each update in parts that don't depend on the layout (batch_parts), with dropout, and compare "
        "every bit.",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="Write what was compared to FILE, as JSON.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write a page with the differences to FILE.")
    parser.add_argument("--explain", metavar="CODE", help="Say what a finding's code stands for, and end.")
    parser.set_defaults(func=verify_command, script_args=[])
    return parser


def verify_command(args: argparse.Namespace) -> int:
    """Run the layouts, print the table, and return 0 (all agree), 1 (one differs) or 2 (one couldn't be run)."""
    from .verify.findings import CODES
    from .verify.layouts import chosen
    from .verify.prove import prove
    from .verify.report import as_html, as_json, as_text
    from .verify.runs import VerificationError

    if args.explain:
        code = re.sub(r"^V(?=\d$)", "V0", args.explain.strip().upper())
        text = CODES.get(code)
        print(f"{code}: {text}" if text else f"--explain {args.explain}: no such code. Known: {', '.join(CODES)}.")
        return 0 if text else 2
    try:
        _check(args)
        layouts = chosen(args.layouts, same_bits=args.same_bits)
        how = "by every bit" if args.same_bits else "without dropout"
        updates = by_number(args.num_steps, "update", "updates")
        print(f"Comparing {args.num_steps} {updates} on the CPU, {how} ...", file=sys.stderr, flush=True)
        proof = prove(args.script, args.script_args, args.num_steps, layouts, args.dtype, same_bits=args.same_bits)
    except VerificationError as error:
        print(f"accelerate verify: {error}", file=sys.stderr)
        return 2
    if args.report:
        args.report.write_text(json.dumps(as_json(proof), indent=2) + "\n")
    if args.html:
        args.html.write_text(as_html(proof), encoding="utf-8")
    print(as_text(proof))
    return proof.exit_code


def _check(args: argparse.Namespace) -> None:
    """Check what doesn't need a run: the script, and the places of the reports.

    Raises:
        VerificationError: something can't be used.
    """
    from .verify.runs import VerificationError

    script = args.script
    if script is None:
        raise VerificationError("No script was given. Name the Python file to run: accelerate verify train.py.")
    if script.is_dir():
        raise VerificationError(f"{script} is a folder. Name the Python file to run.")
    if not script.is_file():
        raise VerificationError(f"{script}: there is no such file.")
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise VerificationError(f"{script}:{line}: it isn't valid Python ({getattr(error, 'msg', error)}).") from None
    for option, file in (("--report", args.report), ("--html", args.html)):
        if file is not None and file.is_dir():
            raise VerificationError(f"{option} {file} is a folder. Name a file.")
        if file is not None and not file.parent.is_dir():
            raise VerificationError(f"{option} {file}: there is no folder {file.parent}. Make it first.")


def add_num_steps(parser: argparse.ArgumentParser) -> None:
    """Add the option for the length of compared runs."""
    parser.add_argument(
        *spellings("--num_steps"),
        "--updates",
        type=count,
        default=8,
        metavar="N",
        help="How many updates (steps of the optimizer) to compare.",
    )


def runs_agree(
    prog: str,
    args: argparse.Namespace,
    compare: Callable[[], Sequence[Comparison]],
    conclusion: str,
    otherwise: str = "",
    *,
    aside: bool = False,
) -> bool:
    """Train as `compare` does, show the tables (errors go to `aside`), and return whether all runs agree."""
    from .verify import VerificationError

    print(f"\nComparing {args.num_steps} steps on the CPU, without dropout ...", file=sys.stderr, flush=True)
    try:
        comparisons = compare()
    except VerificationError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # with what the run printed, however long
        return False
    tables = [comparison.text(conclusion) for comparison in comparisons]
    print("\n" + "\n\n".join(tables), file=sys.stderr if aside else sys.stdout)
    differ = any(comparison.differences for comparison in comparisons)
    if differ and otherwise:
        print(otherwise, file=sys.stderr)
    return not differ
