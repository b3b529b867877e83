"""Names of a module that are imported on first use (PEP 562)."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import ResourceLoader


def names_from(module: str, package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module``.

    The names aren't cached in ``module``, so that another library may replace one, here or in its own module.

    Args:
        package: the package of the submodules.
        homes: submodule of ``package`` -> the names defined there, separated by spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        with without_collections():
            return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return get


def names_of_stub(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``module``, whose names are listed by its stub alone.

    The stub is the file beside it that editors and type checkers read. As with `names_from`, names aren't cached.
    """
    own = sys.modules[module]
    package = str(own.__package__)

    @functools.cache
    def homes() -> dict[str, str]:
        return homes_of_stub(cast("ResourceLoader", own.__loader__), f"{own.__file__}i")

    def get(name: str) -> Any:
        if name == "__all__":
            return [each for each, home in homes().items() if home != "."]
        home = homes().get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path = home.lstrip(".")
        with without_collections():
            if not path:
                return importlib.import_module(f".{name}", package)
            defining = __import__(path, {"__package__": package}, None, (name,), len(home) - len(path))
            return getattr(defining, name)

    return get, lambda: sorted({*vars(own), *homes()})


def homes_of_stub(loader: ResourceLoader, stub: str) -> dict[str, str]:
    """Return name -> module, as the stub at the path ``stub`` tells it, one import a line.

    ``from ..nested import find_device as find_device`` tells where a name is defined; ``from . import`` names
    submodules. ``from .imports import *`` passes on the public names of another stub in the same folder, and
    ``from .imports import is_tqdm_available``, without ``as``, doesn't: PEP 484 has the same rules.
    """
    homes: dict[str, str] = {}
    for line in loader.get_data(stub).decode().splitlines():
        if not line.startswith("from "):
            continue
        home, _, names = line.removeprefix("from ").partition(" import ")
        if names == "*":
            passed_on = homes_of_stub(loader, os.path.join(os.path.dirname(stub), f"{home.removeprefix('.')}.pyi"))
            homes.update((name, where) for name, where in passed_on.items() if not name.startswith("_"))
            continue
        for name, *renamed in map(str.split, names.split(",")):
            if renamed:
                homes[name] = home
            else:
                homes.pop(name, None)
    return homes


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's garbage collector, unless it is off already.

    An import leaves next to no garbage. The collections that its allocations start would look at everything that torch
    has allocated, which takes longer than the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def function_in_use(name: str) -> Any:
    """Return the attribute ``name`` of `accelerate.accelerator`, which libraries may have replaced there."""
    return getattr(importlib.import_module(f"{__package__}.accelerator"), name)
