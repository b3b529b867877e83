"""``accelerate reproduce RUN``: check a run's record, run it again, and say whether it is equal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands.parser import Subparsers, command_parser, count, spellings
from ...errors import SettingError
from ...wording import by_number
from .chain import LOCK, Chain, Entry, read_chain

if TYPE_CHECKING:
    from .runs import RecordedRun

_DESCRIPTION = (
    "Run a recorded run again, in a folder of its own, and say whether it is equal, or what differs first and why. The "
    f"record is {LOCK} in the project's folder. Arguments that were left out as secrets follow after --."
)


def reproduce_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate reproduce``."""
    parser = command_parser("reproduce", _DESCRIPTION, subparsers)
    parser.add_argument("run", type=Path, help="The project's folder: the run's Accelerator(project_dir=...).")
    parser.add_argument(
        *spellings("--verify_only"), action="store_true", help="Check the record and the checkpoints, and run nothing."
    )
    parser.add_argument(
        *spellings("--from_update"), type=count, metavar="N", help="Start from the newest checkpoint up to update N."
    )
    parser.add_argument(*spellings("--to_update"), type=count, metavar="N", help="End after update N.")
    parser.add_argument("--run", dest="number", type=count, metavar="N", help="Which run of the folder. [the last one]")
    parser.add_argument(
        *spellings("--write_code"),
        type=Path,
        metavar="FOLDER",
        help="Write the code that the record keeps, because it is in no commit, into FOLDER, and run nothing.",
    )
    parser.add_argument(
        *spellings("--num_processes"), type=count, metavar="N", help="The number of ranks. [that of the run]"
    )
    parser.set_defaults(func=reproduce_command, script_args=[])
    return parser


def reproduce_command(args: argparse.Namespace) -> int:
    """Check and repeat the run; return 0 if it is equal, and 1 if it isn't, or its record was changed.

    Raises:
        SettingError: there is no such record, or it can't be repeated.
    """
    from .runs import check_files, runs_of, write_copies

    project: Path = args.run
    path = project / LOCK
    if not path.is_file():
        raise SettingError(
            f"{path} is not there. The main process of a run writes it at its first update, into the folder that "
            "Accelerator(project_dir=...) names."
        )
    chain = read_chain(path)
    if not chain.entries and not chain.notes:
        chain.problems.append(f"{path} has no entries: it was emptied.")
    is_whole = not chain.problems
    check_files(project, chain)
    runs = runs_of(chain.entries)
    _print_state(path, chain, runs, is_whole)
    if (args.verify_only and args.write_code is None) or chain.problems:
        return 1 if chain.problems else 0
    if not runs:
        raise SettingError(f"{path} has no launch, so there is nothing to repeat.")
    if args.number is not None and args.number > len(runs):
        raise SettingError(f"--run {args.number}: {path} has {len(runs)} {by_number(runs, 'run', 'runs')}.")
    run = runs[(args.number or len(runs)) - 1]
    if args.write_code is None:
        return _repeat(args, project, run)
    try:
        for written in write_copies(run.launches[-1], chain.entries, args.write_code):
            print(written)
    except OSError as error:
        raise SettingError(f"--write_code {args.write_code}: {error}. Name a new folder.") from error
    return 0


def _print_state(path: Path, chain: Chain, runs: Sequence[RecordedRun], is_whole: bool) -> None:
    """Print the numbers of entries of the record, and its problems."""
    counts = [len(runs), *(sum(len(getattr(run, name)) for run in runs) for name in ("launches", "checkpoints"))]
    words = (("run", "runs"), ("launch", "launches"), ("checkpoint", "checkpoints"))
    shown = ", ".join(f"{number} {by_number(number, *word)}" for number, word in zip(counts, words, strict=True))
    state = "is whole" if is_whole else "was changed"
    print(f"{path}: {shown}. The record {state}, and ends with {chain.head[:16]}.")
    for line in (*chain.problems, *chain.notes):
        print(f"  {line}")
    if runs and not runs[-1].has_end:
        print("  It has no end: the program was killed, still runs, or its last entries were removed.")
    for number, run in enumerate(runs, 1):
        for update in run.repeated:
            print(f"  Run {number}: two launches have computed update {update} with different results.")


def _repeat(args: argparse.Namespace, project: Path, run: RecordedRun) -> int:
    from .again import run_again
    from .runs import FACTS, compare, explain

    start = _start(args.from_update, project, run)
    first = 0 if start is None else start["updates"]
    launch = run.launches[0] if start is None else run.launch_at(first)
    asked = run.last if args.to_update is None else args.to_update
    points = [update for update in run.points if first < update <= asked]
    if not points:
        raise SettingError(
            f"No fingerprint was recorded after update {first} and up to update {asked}. There are fingerprints at "
            f"updates {', '.join(map(str, sorted(run.points)))}."
        )
    last, ranks = max(points), args.num_processes or launch["ranks"]
    since = "from nothing" if start is None else f"from {start['folder']} (update {first})"
    print(f"Running again {since} to update {last}, on {ranks} {by_number(ranks, 'rank', 'ranks')} ...", flush=True)
    checkpoint = None if start is None else project / start["folder"]
    again, last_lines = run_again(launch, project, checkpoint, points, args.script_args, ranks)
    found = compare(run.points, {} if again is None else again.points, first, last)
    equal = f"{len(found.equal)} {by_number(found.equal, 'fingerprint', 'fingerprints')}"
    if again is not None and found.update is not None:
        before = f"update {found.equal[-1]} is equal" if found.equal else "nothing before it is equal"
        print(f"Different at update {found.update} ({before}): {' and '.join(FACTS[name] for name in found.facts)}.")
        print("\n".join(explain(launch, again.launches[0], found.update, found.facts)))
    elif found.missing:
        ended = "before its first update" if again is None else f"after update {max(again.points)} of {last}"
        print(f"The script ended {ended}. Equal up to there: {equal}.{last_lines}")
    else:
        print(f"Equal: {equal}, from update {first} to update {last}.")
        return 0
    return 1


def _start(update: int | None, project: Path, run: RecordedRun) -> Entry | None:
    """Return the newest checkpoint up to ``update`` that is there; None to start from nothing."""
    if update is None:
        if resumed := run.launches[0]["resumed"]:
            raise SettingError(
                f"The record begins with a launch that went on from update {resumed['updates']}, so the run can't be "
                "repeated from nothing. --from_update N repeats it from a checkpoint."
            )
        return None
    there = [one for one in run.checkpoints if "://" not in one["folder"] and (project / one["folder"]).is_dir()]
    found = [one for one in there if one["updates"] <= update]
    if not found:
        at = ", ".join(str(one["updates"]) for one in there)
        known = f"There are checkpoints at updates {at}." if at else "The run has no checkpoints."
        raise SettingError(f"--from_update {update}: there is no checkpoint up to that update. {known}")
    return max(found, key=lambda one: one["updates"])
