"""``accelerate monitor RUN``: a live page or terminal view of a run, from the files in its folder."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...commands.parser import Subparsers, command_parser
from ...errors import SettingError
from . import terminal
from .export import export
from .runs import Runs
from .serve import PORT, server_of
from .snapshot import snapshot

_DESCRIPTION: Final = (
    "Show a run while it trains, or the runs of a folder beside each other: a page on this machine (the default), or "
    "the terminal. A run reports if it is started with `accelerate launch --monitor`, or its script calls "
    "`run = accelerator.watch_run()` and `run.step(loss)`."
)


def monitor_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate monitor``."""
    parser = command_parser("monitor", _DESCRIPTION, subparsers)
    parser.add_argument(
        "run", type=Path, help="The project's folder: the run's Accelerator(project_dir=...); or a folder of several."
    )
    parser.add_argument("--terminal", action="store_true", help="Draw in the terminal instead of serving a page.")
    parser.add_argument("--once", action="store_true", help="Print the run as it is now, as text, and end.")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="Write FILE (.html, .png, .json or .csv) as the run is now, and end.",
    )
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="Of a picture.")
    parser.add_argument("--host", default="127.0.0.1", help="Where to serve; 0.0.0.0 lets other machines in.")
    parser.add_argument(
        "--port", type=int, default=None, help=f"Where to serve; {PORT}, or any free one if that is taken."
    )
    parser.add_argument("--open", action="store_true", help="Show the page in the browser.")
    parser.set_defaults(func=monitor_command)
    return parser


def monitor_command(args: argparse.Namespace) -> int:
    """Show the run as a page, in the terminal or as an exported file, and return 0.

    Raises:
        SettingError: the folder doesn't exist, or the exported file has an unknown type.
        MissingDependency: a picture needs a browser.
    """
    if args.export is None and not args.once and not args.terminal:
        return _serve(Runs(args.run, may_come=True), args)
    runs = Runs(args.run)
    run = runs.find("")
    if run is None:
        return _list(runs, args)
    run.refresh()
    if args.export is not None:
        export(run, args.export, theme=args.theme)
        print(args.export)
        return 0
    if args.once or not sys.stdout.isatty():
        print("\n".join(terminal.screen(snapshot(run), 120)))
    else:
        with suppress(KeyboardInterrupt):
            terminal.watch(run, sys.stdout)
    return 0


def _list(runs: Runs, args: argparse.Namespace) -> int:
    """Print the runs of a folder with several; each can be shown by its own folder."""
    listed = runs.listed()
    if args.export is not None:
        raise SettingError(
            f"--export {args.export}: {args.run} holds {listed['num_found']} runs, a file shows one. Give the folder "
            f"of one: {', '.join(str(args.run / run['run']) for run in listed['runs'][:4])}."
        )
    print("\n".join(terminal.table(listed)))
    return 0


def _serve(runs: Runs, args: argparse.Namespace) -> int:
    server = server_of(runs, args.host, args.port)
    waits = "" if runs.folder.exists() else f"  {args.run} doesn't exist yet; waiting for a run to start."
    with server, suppress(KeyboardInterrupt):
        print(f"Showing {runs.folder.name} at {server.url}  (Ctrl-C ends){waits}", flush=True)
        if args.open:
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever()
    return 0
