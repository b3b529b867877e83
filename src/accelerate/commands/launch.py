"""``accelerate launch``: flags, file and environment become settings, settings become a plan, the plan is
run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AccelerateError, SettingError
from ..launch.choose import choose
from ..launch.engine import is_cpu_run
from ..launch.host import Host, this_host
from ..launch.plan import LaunchPlan, Program
from ..launch.simple import OneProcess, ProcessFailed
from ..settings import env, file
from ..settings.run import check_launchable, collect, launch_options_of, refuse_unbuilt
from ..settings.tree import Settings
from .parser import build_launch_parser

if TYPE_CHECKING:
    from ..launch.engine import LaunchEngine

__all__ = ["launch_command", "launch_command_parser", "main"]

_OWN_NAMES = ("config_file", "explain", "dry_run", "training_script", "training_script_args")


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of the launcher's command line; what follows the script is left as it is."""
    if subparsers is not None:
        parser = subparsers.add_parser("launch", add_help=False, allow_abbrev=False)
        parser.set_defaults(func=launch_command)
        return parser
    return build_launch_parser(launch_options_of())


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line gave, by option destination; an option that was left out is not in it."""
    given = {
        name: value for name, value in vars(args).items() if value is not None and name not in (*_OWN_NAMES, "func")
    }
    if getattr(args, "fp16", None):
        print("accelerate launch: --fp16 is an old spelling of --mixed_precision fp16.", file=sys.stderr)
    return given


def config_path(args: argparse.Namespace) -> Path | None:
    """The configuration file of this launch: the one named, else the default one where it exists and applies.

    With ``--cpu`` the default file isn't read: it describes another machine.
    """
    named = getattr(args, "config_file", None)
    if named is not None:
        return Path(named).expanduser()
    if getattr(args, "cpu", None):
        return None
    default = Path(file.default_config_file())
    return default if default.is_file() else None


def settings_of(args: argparse.Namespace) -> Settings:
    """All that this launch was told: flag before file before environment before default, checked."""
    path = config_path(args)
    settings = collect({}, env.snapshot(), flags=given_flags(args), file=path)
    refuse_unbuilt(settings)
    check_launchable(settings)
    return settings


def program_of(args: argparse.Namespace, settings: Settings) -> Program:
    """The program to run, which exists.

    Raises:
        SettingError: the script isn't there, or the ways of naming it contradict each other.
    """
    launch = settings.launch
    target, arguments = str(args.training_script), tuple(str(word) for word in args.training_script_args)
    if launch.module and launch.no_python:
        raise SettingError("--module and --no_python contradict each other: give one of them.")
    if launch.module:
        return Program(target, arguments, "module")
    if launch.no_python:
        if shutil.which(target) is None:
            raise SettingError(f"--no_python {target}: there is no such command on the PATH.")
        return Program(target, arguments, "command")
    if not Path(target).exists():
        near = sorted(Path(target).parent.glob("*.py"))[:3] if Path(target).parent.is_dir() else []
        hint = f" There are: {', '.join(map(str, near))}." if near else ""
        raise SettingError(f"The script {target} doesn't exist (looked for it from {Path.cwd()}).{hint}")
    return Program(target, arguments)


def plan_launch(args: argparse.Namespace) -> tuple[Settings, LaunchEngine, LaunchPlan]:
    """(settings, engine, plan) of a launch; nothing has been started."""
    settings = settings_of(args)
    program = program_of(args, settings)
    host: Host = this_host(env.snapshot(), cpu=is_cpu_run(settings), port=settings.launch.main_process_port)
    engine = choose(settings, host)
    return settings, engine, engine.plan(settings, program, host)


def _announce(plan: LaunchPlan, settings: Settings) -> None:
    if not settings.launch.quiet:
        for note in plan.notes:
            print(f"accelerate launch: {note}", file=sys.stderr)


def launch_command(args: argparse.Namespace) -> None:
    """The program has run to its end.

    Raises:
        ProcessFailed: it ended with another exit code than 0 (also a ``subprocess.CalledProcessError``).
        SystemExit: the same, under ``--quiet``.
    """
    settings, engine, plan = plan_launch(args)
    if _shown_instead(args, settings, plan):
        return
    _announce(plan, settings)
    code = engine.run(plan)
    if code != 0:
        if settings.launch.quiet:
            sys.exit(code)
        raise ProcessFailed(code, plan.argv)


def _shown_instead(args: argparse.Namespace, settings: Settings, plan: LaunchPlan) -> bool:
    """Whether the user only wanted to look."""
    if getattr(args, "explain", False):
        print(settings.explain())
        return True
    if getattr(args, "dry_run", False):
        print(plan.show())
        return True
    return False


def run_launch(args: argparse.Namespace) -> int:
    """The exit code of the program; one process takes the place of this one, where the system can do that."""
    settings, engine, plan = plan_launch(args)
    if _shown_instead(args, settings, plan):
        return 0
    _announce(plan, settings)
    return engine.become(plan) if isinstance(engine, OneProcess) else engine.run(plan)


def complain(command: str, error: Exception) -> int:
    """The exit code 2, after at most five lines about what is wrong."""
    text = str(error).strip() or type(error).__name__
    print("\n".join(f"{command}: {text}".splitlines()[:5]), file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``accelerate launch``: the program's own, or 2 when the launch was refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = launch_command_parser()
    if not words:
        parser.print_help()
        return 1
    try:
        return run_launch(parser.parse_args(words))
    except (AccelerateError, FileNotFoundError) as error:
        return complain("accelerate launch", error)


def _validate_launch_command(
    args: argparse.Namespace,
) -> tuple[argparse.Namespace, Mapping[str, Any] | None, bool]:
    """(args completed from the file and the defaults, the file's content, whether it gave the precision)."""
    settings = settings_of(args)
    path = config_path(args)
    content = None if path is None else file.read(path)
    for option in launch_options_of():
        if option.dest is not None and getattr(args, option.dest, None) is None:
            setattr(args, option.dest, settings.value_of(option))
    return args, content, settings.source_of("run.mixed_precision").kind == "file"


if __name__ == "__main__":
    sys.exit(main())
