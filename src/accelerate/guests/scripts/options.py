"""Functions shared by the commands for a user's script: read it, and compare its runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands.parser import count, spellings

if TYPE_CHECKING:
    from .verify import Comparison


def read_script(path: Path) -> str:
    """Return the text of a script, line endings included.

    Raises:
        Refused: it is a notebook, or isn't text.
    """
    from .migrate import Refused

    if path.suffix == ".ipynb":
        raise Refused(f"{path}:1: it is a notebook; export it as a script first (jupyter nbconvert --to script).")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path}:1: it isn't text in UTF-8 ({error.reason} at byte {error.start}).") from None


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
