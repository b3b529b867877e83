"""The row that describes one group of options; the tables about groups are derived from these rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from .option import OptionGroup


@final
@dataclass(frozen=True, slots=True)
class Group:
    """One group of options: of the core, or of a guest.

    Args:
        name: the attribute of Settings.
        options: the class that declares the options.
        condition: the option that turns the group on; empty if the group is always there.
        arguments: the Accelerator's arguments that are the whole group.
        keyword: the option of a guest that is a keyword argument of the Accelerator; empty if none is.
        plugin: the class that users construct for them.
        paradigm: the distributed type that the group stands for.
        exported: whether the ranks get its variables; only the launcher needs the others.
        decided: whether every launch decides its values.
        host_file: the option that names a file with the hosts of a launch.
        keys_of_file: the option of another group that lists the keys of this group in a file. Other keys of its section
            are kept, because another program reads them.
        check: raises SettingError if the settings contradict each other; called if the group is in use.
        missing: returns which package the group needs and how to install it; empty if it is installed.
        engine: ``module:function`` for an engine that trains instead of torch. It is called with the settings, the
            Accelerator's arguments and the state of the first Accelerator. It returns the plugin, or several by name,
            and the one in use, in the run's precision.
        questions: ``module:function`` that asks, for ``accelerate config``, whether the engine is used, and for its
            options. It is called with the questionnaire and the type of machine; it returns whether it is used.
    """

    name: str
    options: type[OptionGroup]
    condition: str = ""
    arguments: tuple[str, ...] = ()
    plugin: str = ""
    paradigm: str = ""
    exported: bool = True
    decided: bool = False
    host_file: str = ""
    keys_of_file: str = ""
    check: Callable[[Any], None] | None = None
    missing: Callable[[], str] | None = None
    engine: str = ""
    questions: str = ""
    keyword: str = ""
