"""``accelerate replay``: open a run before one of its updates, or try it on from there."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Final

from ...commands.parser import Subparsers, command_parser, count, spellings
from ...errors import SettingError
from .bisect_command import add_run_options, search_of

_DESCRIPTION: Final = (
    "Open a run before one of its updates in an interactive Python. Model, optimizer and loader are as they were, and "
    "the next batch is that of the update. With --without_samples or --with, run on from there into a folder of its "
    "own. The run's command follows after --, unless its folder has a run.lock.json."
)


def replay_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate replay``."""
    parser = command_parser("replay", _DESCRIPTION, subparsers)
    parser.add_argument("run", type=Path, help="The run's folder: Accelerator(project_dir=...).")
    parser.add_argument("--update", type=count, required=True, metavar="N", help="The update, counted from 1 on.")
    parser.add_argument("--samples", type=_indices, default=[], metavar="IDS", help="Samples for the variable batch.")
    parser.add_argument(
        *spellings("--to_notebook"), type=Path, metavar="FILE", help="Write a notebook that opens the run, and end."
    )
    parser.add_argument(
        *spellings("--without_samples"),
        type=_indices,
        default=[],
        metavar="IDS",
        help="Run on without these samples: their indices in the data set, separated by commas.",
    )
    parser.add_argument(
        "--with", dest="changes", type=_change, action="append", default=[], metavar="NAME=VALUE",
        help="Run on with another option of the optimizer, such as lr=0.01.",
    )  # fmt: skip
    parser.add_argument("--branch", type=Path, metavar="FOLDER", help="The folder of the run on. [RUN_update_N]")
    parser.add_argument("--until", type=count, metavar="M", help="The last update of the run on. [the script's end]")
    add_run_options(parser)
    parser.set_defaults(func=replay_command, script_args=[])
    return parser


def _indices(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a list of indices, such as 3,17") from None


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=NUMBER, such as lr=0.01") from None


def replay_command(args: argparse.Namespace) -> int:
    """Open the run, write a notebook, or run on; return 0."""
    from .position import branch, notebook, open_at

    if args.until is not None and (args.until < args.update or not (args.without_samples or args.changes)):
        why = (
            f"it is before --update {args.update}" if args.until < args.update else "it ends a branch, and none is made"
        )
        raise SettingError(f"--until {args.until}: {why}. Give a later one with --with or --without_samples.")
    if args.to_notebook is not None:
        if args.to_notebook.exists():
            raise SettingError(f"--to_notebook {args.to_notebook}: there is such a file. Give another name.")
        content = notebook(args.run, args.update, args.script_args, args.samples)
        args.to_notebook.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{args.to_notebook} opens {args.run} before update {args.update}.")
        return 0
    if args.without_samples or args.changes:
        folder = args.branch or args.run.resolve().with_name(f"{args.run.resolve().name}_update_{args.update}")
        with tempfile.TemporaryDirectory(prefix="accelerate_replay_") as name:
            search = search_of(args.run, args.script_args, args.num_processes, Path(name))
            branch(
                search, args.update, folder,
                until=args.until, without_samples=args.without_samples, changes=dict(args.changes),
            )  # fmt: skip
        print(f"{folder} has the run from update {args.update} on. Its file branch.json says where it comes from.")
        return 0
    import code

    names = open_at(args.run, args.update, args.script_args, num_processes=args.num_processes, samples=args.samples)
    known = [name for name in ("accelerator", "model", "optimizer", "scheduler", "loader", "batch") if name in names]
    banner = (
        f"{args.run} before update {args.update}, as one process: {', '.join(known)}, and the names of the script.\n"
        "The next batch of the loader is that of the update. Files that are written here go to a temporary folder."
    )
    code.interact(banner=banner, local=names, exitmsg="")
    return 0
