"""Names of a module that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names_from(module: str, package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of ``module``.

    The names aren't cached in ``module``, so that another library's replacement of one, here or at its home, counts.

    Args:
        package: the package of the homes.
        homes: submodule of ``package`` -> the names that are defined there, with spaces between.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return get
