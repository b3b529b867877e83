"""A parsed command line of the launcher as settings and a program."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from ..errors import SettingError
from ..settings import env, file
from ..settings.run import check_launchable, collect
from ..settings.tree import Settings
from . import preflight
from .plan import Program
from .slurm import in_batch_script

_NO_COMMAND: Final = "there is no such command on the PATH"
_OWN_NAMES: Final = ("config_file", "explain", "dry_run", "training_script", "training_script_args", "func")


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line gave, by option destination; an option that was left out is not in it."""
    given = {name: value for name, value in vars(args).items() if value is not None and name not in _OWN_NAMES}
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
    environ = env.snapshot()
    settings = collect({}, environ, flags=given_flags(args), file=path)
    check_launchable(settings, has_allocation=in_batch_script(environ))
    return settings


def program_of(args: argparse.Namespace, settings: Settings) -> Program:
    """The program to run, which exists; the check of the machines with ``--preflight``.

    Raises:
        SettingError: the script isn't there, or the ways of naming it contradict each other.
    """
    launch = settings.launch
    if settings.cluster.preflight:
        return preflight.program_of(settings)
    target, arguments = str(args.training_script), tuple(str(word) for word in args.training_script_args)
    if launch.module and launch.no_python:
        raise SettingError("--module and --no_python contradict each other: give one of them.")
    if launch.module:
        return Program(target, arguments, "module")
    if launch.no_python:
        if shutil.which(target) is None:
            why = f"it can't be run: `chmod +x {shlex.quote(target)}`" if Path(target).is_file() else _NO_COMMAND
            raise SettingError(f"--no_python {target}: {why}.")
        return Program(target, arguments, "command")
    if not (Path(target).is_file() or (Path(target) / "__main__.py").is_file()):
        near = sorted(Path(target).parent.glob("*.py"))[:3] if Path(target).parent.is_dir() else []
        hint = f" There are: {', '.join(map(str, near))}." if near else ""
        if target and Path(target).is_dir():
            raise SettingError(f"{target!r} is a folder, and has no `__main__.py` that could be run.{hint}")
        raise SettingError(f"The script {target!r} doesn't exist (looked for it from {Path.cwd()}).{hint}")
    return Program(target, arguments)
