"""Names of a module that are imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


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
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    return get


def function_in_use(name: str) -> Any:
    """Return the attribute ``name`` of `accelerate.accelerator`, which libraries may have replaced there."""
    return getattr(importlib.import_module(f"{__package__}.accelerator"), name)
