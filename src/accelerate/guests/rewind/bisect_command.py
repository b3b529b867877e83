"""``accelerate bisect``: find the first update of a run at which a condition holds, and the cause inside of it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...commands.parser import Subparsers, command_parser, spellings
from ...errors import SettingError

if TYPE_CHECKING:
    from .search import Found, Search

_DESCRIPTION: Final = (
    "Find the first update of a run at which a condition holds: by its log, else by replays from its checkpoints. Then "
    "name the first part of it to be not finite, different or unusually large: samples, a module, a weight. "
    "The run's files don't change. The run's command follows after --, unless its folder has a run.lock.json."
)

#: In the words of a record: a part that looks like a secret, and was left out.
_MASK: Final = "***"


def bisect_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate bisect``."""
    parser = command_parser("bisect", _DESCRIPTION, subparsers)
    parser.add_argument("run", type=Path, help="The run's folder: Accelerator(project_dir=...).")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--when", metavar="CONDITION", help='Such as "grad_norm > 10", "loss > 4" or "not finite".')
    what.add_argument("--against", type=Path, metavar="RUN", help="The folder of another run that should be equal.")
    what.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="A program that gets the folder of a checkpoint. It ends with 0 if the state is good, with 1 if not.",
    )
    add_run_options(parser)
    parser.add_argument(
        *spellings("--against_command"),
        metavar="COMMAND",
        help="The command of the other run, in quotes; without it, the same.",
    )
    parser.add_argument("--show", metavar="MODULE:FUNCTION", help="A function of the data set's index: shows a sample.")
    parser.set_defaults(func=bisect_command, script_args=[])
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about how the run is started again."""
    parser.add_argument(
        *spellings("--num_processes"), type=int, metavar="N", help="The run's ranks. [those of its checkpoints]"
    )


def search_of(run: Path, command: Sequence[str], num_processes: int | None, workspace: Path) -> Search:
    """Return the search in a run, with its own command unless one is given.

    Raises:
        SettingError: the run isn't there, or its command isn't known.
    """
    from .run_folder import RunFolder
    from .search import Search

    folder = RunFolder(run)
    ranks = num_processes or folder.num_processes
    if command:
        return Search(folder, command, ranks, workspace)
    recorded = folder.recorded
    if recorded is None or not recorded.words:
        raise SettingError(
            f"{run} doesn't say how the run was started: it has no run.lock.json. Give the command after --, such as "
            "-- train.py --epochs 3."
        )
    left_out = [word for word in recorded.words if _MASK in word]
    if left_out:
        raise SettingError(
            f"{run}: its record leaves out arguments that look like secrets ({' '.join(left_out)}). Give the whole "
            "command after --, such as -- train.py --api_key VALUE."
        )
    return Search(folder, recorded.words, ranks, workspace, recorded.variables, recorded.folder)


def bisect_command(args: argparse.Namespace) -> int:
    """Search, print the result, and return 0 if the update was found, 1 if the condition never holds."""
    from .run_folder import Condition

    condition = None if args.when is None else Condition.parse(args.when)
    with tempfile.TemporaryDirectory(prefix="accelerate_bisect_") as name:
        search = search_of(args.run, args.script_args, args.num_processes, Path(name))
        if condition is not None:
            found = search.first(condition)
        elif args.script is not None:
            found = search.first_by_script(args.script)
        else:
            command = shlex.split(args.against_command) if args.against_command else args.script_args
            found = search.first_against(search_of(args.against, command, args.num_processes, Path(name) / "other"))
        print(as_text(found, args, search))
    return 0 if found.number is not None else 1


def as_text(found: Found, args: argparse.Namespace, search: Search) -> str:
    """Return the result, one fact a line."""
    from .updates import compare

    lines: list[tuple[str, str]] = []
    finding, number = found.finding, found.number
    if number is None:
        lines.append(("First update", "none"))
    else:
        lines += [("First update", f"{number} ({_numbers(found.values)})" if found.values else str(number))]
        if found.before:
            lines.append(("The other run" if args.against else "Update before", _numbers(found.before)))
    lines.append(("Found by", found.how))
    if finding is not None:
        place = f"rank {finding.rank}" + ("" if finding.batch is None else f", micro-batch {finding.batch + 1}")
        lines.append(("First part", f"{finding.what} {finding.how} ({place})"))
        if finding.module:
            lines.append(("Module", finding.module))
        if finding.samples:
            lines.append(("Samples", ", ".join(map(str, finding.samples))))
            lines += shown(args.show, finding.samples)
    elif number is not None:
        lines.append(("First part", "nothing in this update stands out from those before"))
    if search.last is not None:
        num_equal = sum(not one.difference for one in compare(search.run, search.last))
        equal = f"equal to the run in {num_equal} logged numbers, fingerprints and checkpoints"
        lines.append(("Replay", f"not equal to the run. {' '.join(found.checks)}" if found.checks else equal))
    if number is not None:
        command = ["accelerate", "replay", str(args.run), "--update", str(number)]
        if finding is not None and finding.samples:
            command += ["--samples", ",".join(map(str, finding.samples))]
        if args.script_args:
            command += ["--", *args.script_args]
        lines.append(("To look at it", shlex.join(command)))
    return "\n".join(f"{title:<14} {text}" for title, text in lines)


def shown(function: str | None, samples: Sequence[int]) -> list[tuple[str, str]]:
    """Return samples with what the user's function shows of them."""
    if not function:
        return []
    from ...seams import load

    sys.path.insert(0, "")
    show = load(function)
    return [(f"  sample {sample}", str(show(sample))) for sample in samples]


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())
