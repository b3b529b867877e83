"""``accelerate test``: the packaged sanity script, launched with this configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parser import WHICH_FILE, Subparsers, command_parser, spellings


def test_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate test``."""
    parser = command_parser(
        "test",
        "Check with a small training run that the configuration works. Flags of the launcher may follow.",
        subparsers,
    )
    parser.add_argument(*spellings("--config_file"), default=None, help=f"The file to test. {WHICH_FILE}")
    parser.set_defaults(func=test_command, launch_flags=[])
    return parser


def script() -> Path:
    """Return the path of the packaged sanity script."""
    return Path(__file__).resolve().parent.parent / "test_utils" / "scripts" / "test_script.py"


def test_command(args: argparse.Namespace) -> int:
    """Run the sanity script, print whether it succeeded and return its exit code."""
    from ..launch.local import OneProcess
    from .launch import launch_command_parser, plan_launch

    argv = [*args.launch_flags, str(script())]
    if args.config_file is not None:
        argv = ["--config_file", args.config_file, *argv]
    settings, engine, plan = plan_launch(launch_command_parser().parse_args(argv))
    print(f"Running: accelerate launch {' '.join(argv)}", flush=True)
    code = engine.run(plan)
    if code == 0:
        how = "one process" if isinstance(engine, OneProcess) else f"{max(1, plan.num_processes)} processes"
        print(f"Test is a success! ({how}, mixed_precision={settings.run.mixed_precision})")
    return code


# pytest collects functions by this name where the module is imported into a test.
test_command.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]
test_command_parser.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]
