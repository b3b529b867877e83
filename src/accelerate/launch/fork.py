"""A rank as a copy of this process, and what every rank that runs a function does: call it, hand back its
result.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ..errors import LaunchError
from ..optional import is_installed, require
from .supervise import Starter, die_with_parent


def accelerator_is_initialized() -> bool:
    """Whether this process has touched an accelerator, so that it must not be forked."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for name in ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu"):
        module = getattr(torch, name, None)
        check = getattr(module, "is_initialized", None)
        if check is not None and check():
            return True
    return False


def fork_is_safe() -> bool:
    """Whether a copy of this process can go on: no accelerator touched, called from the main thread."""
    return (
        hasattr(os, "fork")
        and not accelerator_is_initialized()
        and threading.current_thread() is threading.main_thread()
    )


def start_fork(function: Callable[..., Any], args: Sequence[Any], home: Path) -> Starter:
    """Starts a rank as a copy of this process that calls the function and ends."""
    tie_to_parent = die_with_parent()

    def start(local_rank: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            tie_to_parent()
            _take_place(environment, stdout, stderr)
            code = call_and_report(function, args, home, int(environment["RANK"]), is_copy=True)
        except BaseException:  # nothing of the parent's stack may run in the child
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)

    return start


def _take_place(environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> None:
    """The forked child has the rank's environment, outputs, signals and threads."""
    import signal

    from ..settings import env

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    env.publish(environment)
    for target, name, source in ((1, "stdout", stdout), (2, "stderr", stderr)):
        if source is not None:
            os.dup2(source, target)
            setattr(sys, name, io.TextIOWrapper(os.fdopen(target, "wb", closefd=False), line_buffering=True))
    _leave_the_notebook()
    if "torch" in sys.modules:
        # The threads of the parent's pool don't exist here; a parallel region would wait for them for ever.
        sys.modules["torch"].set_num_threads(1)


def _leave_the_notebook() -> None:
    """What this copy of a kernel displays is text on its output: the notebook's page listens to the kernel alone."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    from IPython.core.displaypub import DisplayPublisher

    shell.display_pub = DisplayPublisher(parent=shell)
    shell.display_pub.shell = shell
    shell.config.pop("IPKernelApp", None)  # by this entry tqdm.auto and others tell a notebook from a terminal
    bars = sys.modules.get("tqdm.notebook")
    if bars is None:
        return
    # A cell may have imported the bar made of widgets already; without its own methods it is the plain bar.
    for name, value in tuple(vars(bars.tqdm_notebook).items()):
        if callable(value) or isinstance(value, (staticmethod, property)):
            with contextlib.suppress(AttributeError):
                delattr(bars.tqdm_notebook, name)


def call_and_report(
    function: Callable[..., Any], args: Sequence[Any], home: Path, rank: int, *, is_copy: bool = False
) -> int:
    """0 once the result is where the parent looks for it; 1 after the traceback has been printed."""
    try:
        result = function(*args)
        write_result(home, rank, result, is_copy=is_copy)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # reported to the parent, which raises
        traceback.print_exc()
        return 1
    finally:
        _leave()
    return 0


def _leave() -> None:
    world = sys.modules.get("accelerate.world")
    if world is not None:
        world.leave_world()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def write_result(home: Path, rank: int, result: object, *, is_copy: bool = False) -> None:
    """The parent can read what this rank returned; nothing needs to be written for None.

    A copy of the parent names the classes that both know, so that the parent gets instances of its own.
    """
    if result is None:
        return
    if not is_installed("cloudpickle"):
        if rank == 0:
            print(
                f"A {type(result).__name__} was returned, but results travel between processes only with "
                'cloudpickle: pip install "accelerate[notebook]". None is returned instead.',
                file=sys.stderr,
            )
        return
    path = home / f"result_{rank}"
    if is_copy:
        with contextlib.suppress(Exception):  # what only this rank has defined travels by value
            path.write_bytes(_packed_by_name(result))
            return
    path.write_bytes(require("cloudpickle").dumps(result))


def _packed_by_name(result: object) -> bytes:
    """The result, with classes and functions as names, also those of ``__main__``."""

    @final
    class ByName(require("cloudpickle").CloudPickler):
        def reducer_override(self, _value: object) -> object:
            return NotImplemented

    buffer = io.BytesIO()
    ByName(buffer).dump(result)
    return buffer.getvalue()


def read_result(home: Path, rank: int) -> Any:
    """What the rank returned; a child of ours wrote it, into a folder that only this user can open."""
    path = home / f"result_{rank}"
    return require("cloudpickle").loads(path.read_bytes()) if path.exists() else None


def _cells() -> dict[str, list[str]]:
    """The source lines of what was typed here and lies in no file: a traceback elsewhere can show them too."""
    found: dict[str, list[str]] = {}
    for name, entry in linecache.cache.items():
        if len(entry) == 4 and not os.path.exists(name):  # shorter entries are promises to read a file
            found[name] = entry[2]
    return found


def write_function(home: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """A process that is started for it can read the function, with what ``__main__`` defines packed along.

    Raises:
        LaunchError: it can't travel.
    """
    cloudpickle = require("cloudpickle", "notebook", purpose="Starting fresh processes for a function")
    try:
        packed = cloudpickle.dumps((_cells(), function, tuple(args)))
    except Exception as error:  # any object on the way may fail to describe itself
        raise LaunchError(
            f"The function or its arguments can't travel to fresh processes: {error}. Create what can't be "
            "packed "
            "(models on a device, open files, locks) inside the function."
        ) from error
    (home / "function").write_bytes(packed)


@final
class Parcel:
    """A function that travels by value where processes are started by pickling; so does what it returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._packed: bytes = require("cloudpickle", "notebook").dumps(function)
        # torch's agent asks the function for its name
        self.__name__ = self.__qualname__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any) -> bytes:
        cloudpickle = require("cloudpickle")
        return cloudpickle.dumps(cloudpickle.loads(self._packed)(*args))


def read_function(home: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments, in a process that was started for them."""
    cells, function, args = require("cloudpickle").loads((home / "function").read_bytes())
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return function, args
