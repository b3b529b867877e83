"""The registry of private names of torch, and the error if the installed torch lacks one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from ..errors import MissingDependency

#: The versions of torch against which every name was checked or tested; see docs/versions.md.
CHECKED: Final = ("2.6.0", "2.13.0", "2.14.1", "2.15.0")

Function = TypeVar("Function", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class PrivateName:
    """A name in torch that torch doesn't document or promise to keep.

    ``place`` is ``module:name``, with a dot before the name for an attribute of the module's objects. ``parameters``
    are a function's parameters, in order; other versions may add some with defaults. ``instead`` is the place in
    versions that don't have it at ``place``; ``since`` is the first version with it.

    """

    place: str
    parameters: str | None = None
    instead: str | None = None
    since: str = CHECKED[0]

    @property
    def module(self) -> str:
        """The module that defines it, by its import name."""
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """Its name in that module."""
        return self.place.partition(":")[2].removeprefix(".")

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute of objects, which an import can't check."""
        return ":." in self.place

    def is_there(self) -> bool:
        """Return whether the installed torch has it; True for attributes."""
        if self.is_attribute:
            return True
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return False
        return True


#: All private names by the module that uses them.
REGISTERED: Final[dict[str, tuple[PrivateName, ...]]] = {}


def _named(places: tuple[str | tuple[str | None, ...], ...]) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(place) if isinstance(place, str) else PrivateName(*place) for place in places)  # pyright: ignore[reportArgumentType]


def declare(user: str, *places: str | tuple[str | None, ...]) -> None:
    """Register names that the module ``user`` re-exports unchanged."""
    REGISTERED[user] = _named(places)


def uses(*places: str | tuple[str | None, ...]) -> Callable[[Function], Function]:
    """Decorate a function that needs these names of torch; if one is missing, calls raise with advice on versions.

    Each argument is the place of a :class:`PrivateName`, or all its fields.

    Raises:
        MissingDependency: the function is called, and the installed torch lacks a name.
    """
    names = _named(places)

    def decorate(function: Function) -> Function:
        REGISTERED[f"{function.__module__}.{function.__qualname__}"] = names

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            try:
                return function(*args, **kwargs)
            except (AttributeError, ImportError) as error:
                missing = [name for name in names if not name.is_there() or _is_named(error, name)]
                if missing:
                    raise refusal(missing) from error
                raise

        return call  # pyright: ignore[reportReturnType]

    return decorate


def _is_named(error: BaseException, name: PrivateName) -> bool:
    return isinstance(error, AttributeError) and error.name == name.name.rpartition(".")[2]


def refusal(missing: list[PrivateName]) -> MissingDependency:
    """Return the error for a torch that lacks these names."""
    import torch

    listed = ", ".join(f"{name.module}.{name.name}" for name in missing)
    return MissingDependency(
        f"accelerate relies on {listed}, which torch makes no promise about, and the installed torch "
        f"{torch.__version__} doesn't have it as torch {CHECKED[0]} to {CHECKED[-1]} have. Install one of those "
        f"(pip install 'torch>={CHECKED[0]},<={CHECKED[-1]}'), or a newer accelerate."
    )
