"""Settings and program of a launch, from the launcher's parsed command line."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from ..distributed.environment import in_batch_script
from ..errors import SettingError
from ..settings import env, file
from ..settings.checks import check_launchable
from ..settings.document import read_whole_layer
from ..settings.option import options_of
from ..settings.run import collect
from ..settings.tree import PARADIGMS, Settings, launch_options_of
from . import preflight
from .plan import Program

#: torchrun's words for one process per device.
PER_DEVICE: Final = ("auto", "gpu")
#: What chooses a distributed type on a command line; the others are `--multi_gpu`.
_FLAGS_OF_TYPE: Final[Mapping[str, tuple[str, ...]]] = {
    "MULTI_CPU": ("--cpu",),
    **{label: (f"--{condition.partition('.')[2]}",) for label, condition in PARADIGMS.items()},
    "XLA": ("--tpu",),
}
_NO_COMMAND: Final = "there is no such command on the PATH"


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by destination, without those left out or equal to their documented default.

    Takes the Namespace of the launcher's parser (which names what was given in ``nondefault``), one that
    :func:`complete` has filled in, one that was changed since, and one made by hand.
    """
    named: Collection[str] = getattr(args, "nondefault", ())
    filled: Mapping[str, Any] = getattr(args, "filled_in", {})
    given: dict[str, Any] = {}
    for option in launch_options_of():
        name = option.dest
        value = getattr(args, name, None) if name else None
        if name is None or value is None:
            continue
        untouched = name in filled and value == filled[name]
        if name in named or not (untouched or value == option.flag_default):
            given[name] = value
    if getattr(args, "use_cpu", None) and not filled.get(
        "use_cpu"
    ):  # the name in configuration files, which documented code also sets
        given.setdefault("cpu", True)
    if getattr(args, "fp16", None):
        given["fp16"] = True
        print("accelerate launch: --fp16 is an old spelling of --mixed_precision fp16.", file=sys.stderr)
    return given


def complete(args: argparse.Namespace, settings: Settings) -> None:
    """Fill in what the command line left out, in place, from the settings in use.

    The values filled in stay known as such, so that the Namespace can be read again as if it had just been parsed.
    """
    given = given_flags(args)
    filled: dict[str, Any] = {}
    values = settings.values_of_flags()
    for option in launch_options_of():
        if option.dest is not None and option.dest not in given:
            value = values.get(str(option.flag))
            filled[option.dest] = option.flag_default if value is None else value
            if option.kind == "list":  # text, as on the command line and in the file
                filled[option.dest] = option.write(filled[option.dest])
    filled["use_cpu"] = settings.run.use_cpu
    filled["gpu_ids"] = settings.launch.gpu_ids or "all"
    filled.pop("cpu", None)  # stays as the command line gave it
    for name, value in filled.items():
        setattr(args, name, value)
    args.filled_in = filled


def flags_of(settings: Settings) -> list[str]:
    """Return the command line for a launch with these settings and no file: the differences from its defaults."""
    kind = settings.launch.distributed_type or "NO"
    flags: dict[str, list[str]] = {flag: [flag] for flag in _FLAGS_OF_TYPE.get(kind, ())}
    if kind.startswith("MULTI_") and not flags:
        flags["--multi_gpu"] = ["--multi_gpu"]
    for group, options in settings.groups():
        for option in options_of(type(options)):
            value = getattr(options, option.name)
            if option.flag is None or value == option.launched or not settings.was_given(f"{group}.{option.name}"):
                continue
            written = option.write(value)
            if option.switch:
                flag = option.flag if value else option.off_flag
                flags.update({flag: [flag]} if flag is not None else {})
            elif written is not None:
                flags.setdefault(option.flag, [option.flag, written])
    return [word for words in flags.values() for word in words]


def config_path(args: argparse.Namespace) -> Path | None:
    """Return the configuration file of this launch: the one named, else the default one where it exists and applies.

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
    """Collect and check the settings of this launch: flag before file before environment before default."""
    path = config_path(args)
    environ = env.snapshot()
    layer = None if path is None else read_whole_layer(path)
    per_machine = getattr(args, "processes_per_machine", None)
    if layer is not None and (per_machine in PER_DEVICE or _asks_for_one_per_device(args)):
        layer = {address: value for address, value in layer.items() if address != "launch.num_processes"}
    given, warn = given_flags(args), getattr(args, "filled_in", None) is None
    settings = collect({}, environ, flags=given, file=layer, warn=warn)
    if per_machine is not None:
        count = None if per_machine in PER_DEVICE else per_machine * settings.launch.num_machines
        _check_same_count(settings, given, per_machine, count)
        settings = collect({}, environ, flags=given | {"num_processes": count}, file=layer, warn=False)
    check_launchable(settings, has_allocation=in_batch_script(environ))
    return settings


def _asks_for_one_per_device(args: argparse.Namespace) -> bool:
    """Return whether ``--num_processes -1`` was given, which a parsed command line holds as None."""
    number = getattr(args, "num_processes", None)
    return number == -1 or (number is None and "num_processes" in getattr(args, "nondefault", ()))


def _check_same_count(
    settings: Settings, given: Mapping[str, object], per_machine: int | str, count: int | None
) -> None:
    if given.get("num_processes") not in (None, count):
        raise SettingError(
            f"--nproc_per_node {per_machine} on {settings.launch.num_machines} machine(s) and "
            f"{settings.quote('launch.num_processes')} contradict each other: --num_processes counts the processes of "
            "all machines. Give one of them."
        )


def program_of(args: argparse.Namespace, settings: Settings) -> Program:
    """Return the program to run, which exists; with ``--preflight`` the check of the machines.

    Raises:
        SettingError: the script isn't there, or the ways of naming it contradict each other.
    """
    launch = settings.launch
    if settings.cluster.preflight:
        return preflight.program_of(settings)
    target, arguments = str(args.training_script), tuple(str(argument) for argument in args.training_script_args)
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
