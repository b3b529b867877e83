"""torchvision can be imported beside a torch without CUDA; `make clients` has .clients import this when it starts.

The wheel on PyPI is built for a torch with CUDA: without that its library of operators doesn't load, and the import
fails at the first one that it misses. Transforms, models and data sets are Python and need none; declared without
kernels, those two are refused when they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
DECLARED: list[object] = []  # what was declared lives as long as its library object


class DeclaresOperators(MetaPathFinder):
    """Finds nothing; before torchvision is looked for, its operators are declared."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            DECLARED.append(library)
            for schema in OPERATORS:
                library.define(schema)
        return None


sys.meta_path.insert(0, DeclaresOperators())
