"""Replace functions of torch and of the Accelerator by others around them, and ask who calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any


def wrap(owner: object, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function or method of `owner` by `wrapped(function)`."""
    before: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(wrapped(before)))


def is_of_script(frame: FrameType) -> bool:
    """Return whether a call comes from the script, or from a library that it uses."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("accelerate", "torch")


def trainer_of(frame: FrameType | None) -> Any:
    """Return the Trainer of transformers whose method is being called; None if there is none."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer" and "self" in frame.f_locals:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
