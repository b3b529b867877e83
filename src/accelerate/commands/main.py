"""The command ``accelerate``: finds the subcommand by name and imports that one only."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Final

from ..seams import Command, guests, guests_of_others, load

_HERE: Final = __package__
#: The commands of the core, in the order of the help.
_CORE: Final = tuple(
    Command(name, f"{_HERE}.{module}:{module}_command_parser", help)
    for name, module, help in (
        ("config", "config", "Answer a few questions about this machine and write the configuration file."),
        ("launch", "launch", "Start a program on one process or many, here or on a cluster."),
        ("test", "test", "Check that the configuration works, with a small training run."),
        ("env", "env", "Print versions, devices and the configuration, to be pasted into a report."),
        ("checkpoints", "checkpoints", "List the checkpoints in a folder, and say which of them load."),
        ("merge-weights", "merge", "Merge the sharded weights of a checkpoint into one file."),
        ("to-fsdp2", "to_fsdp2", "Convert a configuration file from FSDP version 1 to version 2."),
    )
)


def commands() -> dict[str, Command]:
    """Return the commands of the core and of the guests, by name, in the order of the help."""
    rows = [*_CORE, *(command for guest in guests().values() for command in guest.commands)]
    return {command.name: command for command in rows}


def _commands_of_others() -> dict[str, Command]:
    return {command.name: command for guest in guests_of_others() for command in guest.commands}


def usage() -> str:
    """Return the help of the command ``accelerate`` itself."""
    lines = ["Usage: accelerate COMMAND [options]", ""]
    lines += [f"  {name:<18}{one.help}" for name, one in {**_commands_of_others(), **commands()}.items()]
    lines += ["", "accelerate COMMAND --help shows the options of one command; accelerate --version the version."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit code; without one, print the help and return 1.

    Ctrl-C and SIGTERM end it as an exception does, so that its processes and temporary folders go with it.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `accelerate ... | head`: the reader has closed the pipe
        sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]  (nothing is left to flush at exit)
        return 141
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str] | None) -> int:
    """Run the subcommand, or print what was asked of the command itself; return the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv:
        print(usage())
        return 1
    name, *rest = argv
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        package = sys.modules["accelerate"]  # this very package, which is imported already
        print(f"accelerate {package.__version__}")
        return 0
    known = commands()
    if name not in known and name not in (known := {**_commands_of_others(), **known}):
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
        print(f"accelerate: there is no command {name!r}.{hint}", file=sys.stderr)
        return 2
    if name == "launch":
        from . import launch

        return launch.main(rest, replace=arguments is None)
    if arguments is None:  # no other code runs in this process
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if name == "config":  # which has subcommands
        from . import config

        return config.main(rest)
    from .parser import run_command

    return run_command(load(known[name].parser)(), rest)


if __name__ == "__main__":
    sys.exit(main())
