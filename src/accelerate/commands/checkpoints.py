"""``accelerate checkpoints``: list the checkpoints in a folder, and check whether they can be loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import CheckpointNotFound
from .parser import Subparsers, command_parser, spellings

if TYPE_CHECKING:
    from ..checkpointing.series import Entry

_DESCRIPTION = "List the checkpoints in a folder: step, epoch, metrics, size, and whether they load."


def checkpoints_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate checkpoints``."""
    parser = command_parser("checkpoints", _DESCRIPTION, subparsers)
    parser.add_argument("folder", help="A project, its folder of checkpoints, or one checkpoint; a path or a URL.")
    parser.add_argument("--check", action="store_true", help="Compare every byte with the manifest, not only sizes.")
    parser.add_argument("--json", action="store_true", help="Print a list of objects for programs.")
    parser.add_argument("--compare", metavar="FOLDER", help="Compare fingerprints with those of the same step there.")
    parser.add_argument("--pin", metavar="NAME", help="Keep this checkpoint, whatever the limits of the run say.")
    parser.add_argument("--unpin", metavar="NAME", help="Subject this checkpoint to the limits of the run again.")
    parser.add_argument(*spellings("--best_metric"), metavar="METRIC", help="Mark the best one by this metric.")
    modes = ("min", "max")
    parser.add_argument(*spellings("--best_mode"), choices=modes, default="min", help="Which value of it is better.")
    parser.set_defaults(func=checkpoints_command)
    return parser


def checkpoints_command(args: argparse.Namespace) -> int:
    """Print the listing and return 0 when at least one checkpoint loads and no compared one differs, else 1.

    Raises:
        CheckpointNotFound: there is no checkpoint in the folder, or none of the given name.
    """
    from ..checkpointing.series import best, list_checkpoints, pin, unpin
    from ..settings.training import ProjectOptions

    entries = list_checkpoints(args.folder, contents=args.check)
    if not entries:
        raise CheckpointNotFound(f"no checkpoint in {args.folder}")
    for name, change in ((args.pin, pin), (args.unpin, unpin)):
        if name is not None:
            change(_named(name, entries).storage)
            entries = list_checkpoints(args.folder, contents=args.check)
    compared = {} if args.compare is None else _compared(entries, args)
    options = ProjectOptions(best_metric=args.best_metric, best_mode=args.best_mode)
    marked = {entry.name for entry in best([entry for entry in entries if entry.problem is None], options)}
    if args.json:
        told = [{**e.as_json(), "best": e.name in marked, "compared": compared.get(e.name)} for e in entries]
        print(json.dumps(told, indent=2))
    else:
        print(table(entries, marked, compared))
    return 0 if any(entry.problem is None for entry in entries) and {*compared.values()} <= {"equal"} else 1


def _compared(entries: Sequence[Entry], args: argparse.Namespace) -> dict[str, str]:
    """Return by name how an entry compares with that of the same step in ``args.compare``, by their fingerprints.

    Raises:
        CheckpointNotFound: there are no two such fingerprints.
    """
    from ..checkpointing.series import list_checkpoints

    others = list_checkpoints(args.compare, contents=args.check)
    if not others:
        raise CheckpointNotFound(f"--compare {args.compare}: no checkpoint in this folder")
    here, there = ({entry.step: entry for entry in each if entry.fingerprint} for each in (entries, others))
    for folder, found in ((args.folder, here), (args.compare, there)):
        if not found:
            why = f"no checkpoint in {folder} has a fingerprint. Runs with batch_parts write them."
            raise CheckpointNotFound(f"--compare {args.compare}: {why}")
    if here.keys().isdisjoint(there):
        steps = [", ".join(map(str, sorted(found, key=str))) for found in (here, there)]
        raise CheckpointNotFound(f"--compare {args.compare}: no step is in both folders: {steps[0]} and {steps[1]}.")
    pairs = [(here[step], there[step]) for step in here.keys() & there.keys()]
    states = {mine.name: "equal" if mine.fingerprint == its.fingerprint else "differs" for mine, its in pairs}
    return states | {mine.name: "broken" for mine, its in pairs if mine.problem or its.problem}


def _named(name: str, entries: Sequence[Entry]) -> Entry:
    for entry in entries:
        if name in (entry.name, str(entry.storage), str(entry.number)):
            return entry
    raise CheckpointNotFound(f"no checkpoint {name!r}; there are {', '.join(entry.name for entry in entries)}")


def table(entries: Sequence[Entry], best: set[str], compared: Mapping[str, str]) -> str:
    """Format the listing: one line per checkpoint, and below it the problems of those that don't load."""
    from ..checkpointing.manifest import format_bytes

    prints = {entry.name: entry.fingerprint[:12] for entry in entries if entry.fingerprint}
    optional = {title: cells for title, cells in (("fingerprint", prints), ("compared", compared)) if cells}
    rows = [("checkpoint", "step", "epoch", "metrics", "size", "ranks", "strategy", *optional, "valid")]
    for entry in entries:
        manifest = entry.manifest
        rows.append(
            (
                entry.name + (" *" if entry.name in best else "") + (" (pinned)" if entry.is_pinned else ""),
                "-" if entry.step is None else str(entry.step),
                "-" if entry.epoch is None else str(entry.epoch),
                " ".join(f"{name}={value:.6g}" for name, value in entry.metrics.items()) or "-",
                format_bytes(entry.num_bytes),
                str(manifest.world_size) if manifest else "-",
                manifest.strategy if manifest else "-",
                *(cells.get(entry.name, "-") for cells in optional.values()),
                "yes" if entry.problem is None else "no",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    problems = [f"{entry.name}: {entry.problem}" for entry in entries if entry.problem is not None]
    return "\n".join([*lines, *([""] if problems else []), *problems])
