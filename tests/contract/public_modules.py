"""The boundary: the modules of public_modules.txt and their names are public, and all else is internal.

The contract tests hold it, and the reference (docs/_site/reference.py) is made from it.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final

PUBLIC_MODULES: Final = (Path(__file__).parent / "public_modules.txt").read_text(encoding="utf-8").split()


def public_module(name: str) -> ModuleType:
    """Import a public module; one that announces a newer address does so unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return importlib.import_module(name)


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: ``__all__``, else the classes and functions that it defines."""
    declared: list[str] | None = getattr(module, "__all__", None)
    if declared is not None:
        return [name for name in declared if not name.startswith("__")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, type) or callable(value))
        and getattr(value, "__module__", None) == module.__name__
    ]
