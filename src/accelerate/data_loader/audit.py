"""What a dataset keeps to itself and a checkpoint can't know: generators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEEPEST: Final = 4  # a transform in a list of transforms in a dataset in a subset
_MOST_ITEMS: Final = 64  # larger containers hold data


def hidden_generators(dataset: Any, known: object = None) -> list[str]:
    """Return where ``dataset``, or a part of it, holds generators other than ``known``: ``dataset.transform.rng``."""
    return list(_search(dataset, "dataset", _DEEPEST, {id(known)}))


def _search(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[str]:
    if isinstance(value, _GENERATORS):
        if id(value) not in seen:
            yield path
        return
    if depth == 0 or id(value) in seen or _keeps_state(value):
        return
    seen.add(id(value))
    for name, item in _members(value):
        yield from _search(item, f"{path}{name}", depth - 1, seen)


def _keeps_state(value: Any) -> bool:
    """Whether the object gives its state itself, generators and all."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _members(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", item) for number, item in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, (str, bytes, torch.Tensor, np.ndarray, type)):
        return []
    return [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
