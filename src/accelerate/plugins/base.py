"""What every public option class can do: show itself as a dictionary, and as the changed arguments."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from ..deprecation import muted
from ..settings import env
from ..settings.option import OptionGroup, Source, option_of


@dataclass
class KwargsHandler:
    """The base of option classes whose fields are keyword arguments of something in torch."""

    #: Fields that are ours: the callee in torch does not know them.
    own_fields: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """The arguments by name, as copies: changing them does not change the handler."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name not in self.own_fields}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments that differ from those of a handler made with nothing given and nothing set."""
        with env.hidden(), muted():
            plain = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if plain.get(name) != value}


def settle(options: OptionGroup, *names: str) -> None:
    """The named fields hold legal values in their canonical spelling.

    Raises:
        SettingError: a value is none of those that the option takes.
    """
    for name in names:
        info = option_of(type(options), name)
        setattr(options, name, info.read(getattr(options, name), argument(options, name)))


def argument(options: OptionGroup, name: str) -> Source:
    """The argument that gave the field ``name``, as error messages show it."""
    return Source("argument", f"{type(options).__name__}({name}=...)")
