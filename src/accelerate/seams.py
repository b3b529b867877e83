"""The seams: how guests attach to the core.

A guest is a capability that the core never names: a folder of ``accelerate.guests``, or a package of another
distribution that is an entry point of the group ``accelerate.guests``. Its module holds ``GUEST``, the rows by which it
attaches. Without its folder, the core and all other guests work as before.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

_GROUP: Final = "accelerate.guests"


@final
@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand of ``accelerate``.

    Args:
        name: what is typed.
        module: of the function ``main(arguments) -> int``, imported when the command runs.
        parser: the function of that module that creates the parser.
        help: one line.
    """

    name: str
    module: str
    parser: str
    help: str


@final
@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """One flag of ``accelerate launch`` that does something around the run, on the launching machine.

    Args:
        flag: ``--name``.
        help: one line.
        begin: ``module:function``, called with the parsed arguments before the launch is planned; it returns a
            function that takes the plan and returns a context, whose value is the plan to run.
    """

    flag: str
    help: str
    begin: str

    @property
    def dest(self) -> str:
        """The name under which argparse stores it."""
        return self.flag[2:].replace("-", "_")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """The rows by which one guest attaches; modules are absolute names, imported when they are needed.

    Args:
        commands: subcommands of ``accelerate``.
        launch_flags: flags of ``accelerate launch``.
        engines: launch engines, each as ``module:class``; they are asked before the core's own.
    """

    commands: tuple[Command, ...] = ()
    launch_flags: tuple[LaunchFlag, ...] = ()
    engines: tuple[str, ...] = ()


@cache
def guests() -> dict[str, Guest]:
    """Return the guests of this package, by the names of their folders."""
    folder = importlib.import_module("accelerate.guests")
    names = sorted(found.name for found in pkgutil.iter_modules(folder.__path__) if found.ispkg)
    return {name: importlib.import_module(f"{folder.__name__}.{name}").GUEST for name in names}


def launch_flags() -> tuple[LaunchFlag, ...]:
    """Return the flags that guests add to ``accelerate launch``."""
    return tuple(flag for guest in guests().values() for flag in guest.launch_flags)


def guests_of_others() -> Iterator[Guest]:
    """Yield the guests of other distributions, found by their entry points."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=_GROUP):
        yield entry.load()


def load(target: str) -> Any:
    """Import ``module:attribute`` and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
