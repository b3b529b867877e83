"""Run a script under observation: its program, its end, functions with others around them, and who calls them."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TypeAlias

#: A function that a hook replaces, and calls in its turn.
Call: TypeAlias = Callable[..., Any]


def main_program(source: Path, words: list[str]) -> Callable[[], None]:
    """Make the file ``source`` the program of this process, with these arguments; return what runs it.

    Args:
        words: the script and its arguments. The source runs as if it were that script.
    """
    script, module = Path(words[0]), ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    sys.argv[:] = words
    sys.path[0:0] = [str(script.resolve().parent)]
    return lambda: exec(compile(source.read_bytes(), str(script), "exec"), module.__dict__)


def end_with_others(folder: Path, pattern: str, num_processes: int, seconds: float) -> NoReturn:
    """End this process at once, but wait for the others, whose collectives it is part of.

    Args:
        folder: where each process that ends leaves a file.
        pattern: of these files' names.
        seconds: the longest time to wait.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(list(folder.glob(pattern))) < num_processes:
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def with_hook(function: Call, hook: Call) -> Call:
    """Return a function that calls `hook` with `function` and its own arguments."""

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        return hook(function, *args, **kwargs)

    return called


def wrap(owner: object, name: str, hook: Call) -> None:
    """Replace a function or method of `owner` by one that calls `hook` with it and the arguments."""
    setattr(owner, name, with_hook(getattr(owner, name), hook))


def caller() -> FrameType:
    """Return the nearest frame outside of this package."""
    frame: FrameType = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(__package__ or "") and frame.f_back is not None:
        frame = frame.f_back
    return frame


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
