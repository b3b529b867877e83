"""Import torch without collecting garbage: the programs that tests start then take a third less of a processor.

Python imports this module when it starts. Torch's import makes a million objects that stay: while it runs, collections
go over them again and again and find nothing, and so does each collection after it, the last one at the end above all.
What the program itself makes is collected as always.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder  # importlib.abc would import much of the library
from types import ModuleType


class _Quick:
    """Find torch and its compiler, which the first step of an optimizer imports, as Python does."""

    def find_spec(self, fullname: str, path: list[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in ("torch", "torch._dynamo"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def without_collections(module: ModuleType) -> None:
            collects = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                if fullname == "torch":  # the other may be imported when the program has objects of its own
                    gc.freeze()
                if collects:
                    gc.enable()

        spec.loader.exec_module = without_collections
        return spec


sys.meta_path.insert(0, _Quick())  # pyright: ignore[reportArgumentType]
