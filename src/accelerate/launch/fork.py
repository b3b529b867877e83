"""Ranks forked from this process, and how functions and results pass between a launching process and its ranks."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, final

from ..devices import table
from ..errors import LaunchError
from ..optional import is_installed, require
from ..settings import env
from .supervisor import Starter, die_with_parent


def accelerator_is_initialized() -> bool:
    """Return whether an accelerator is initialized in this process, which then must not be forked."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for kind in table.KINDS:
        module = None if kind is table.CPU else getattr(torch, kind.name, None)
        check = getattr(module, "is_initialized", None)
        if check is not None and check():
            return True
    return False


def fork_is_safe() -> bool:
    """Return whether this process can be forked: no accelerator initialized, called from the main thread."""
    return (
        hasattr(os, "fork")
        and not accelerator_is_initialized()
        and threading.current_thread() is threading.main_thread()
    )


def start_fork(function: Callable[..., object], args: Sequence[object], folder: Path) -> Starter:
    """Return a starter that forks this process, calls the function in the child and exits."""
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
            _become_rank(environment, stdout, stderr)
            code = call_and_report(function, args, folder, int(environment["RANK"]), is_copy=True)
        except BaseException:  # the child must not return into the parent's stack
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)

    return start


def _become_rank(environment: Mapping[str, str], stdout: int | None, stderr: int | None) -> None:
    """Set up the forked child as a rank: its signal handlers, environment, output descriptors and threads."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    env.set_variables(environment)
    for target, name, source in ((1, "stdout", stdout), (2, "stderr", stderr)):
        if source is not None:
            os.dup2(source, target)
            setattr(sys, name, io.TextIOWrapper(os.fdopen(target, "wb", closefd=False), line_buffering=True))
    _detach_from_notebook()
    if "torch" in sys.modules:
        # The threads of the parent's pool don't exist here; a parallel region would wait for them for ever.
        sys.modules["torch"].set_num_threads(1)


def _detach_from_notebook() -> None:
    """Make the fork of a notebook kernel display plain text on its output.

    The notebook's page shows the display messages of the kernel alone.
    """
    of_process = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not while another thread imports it
    shell = None if of_process is None else of_process()
    if shell is None:
        return
    from IPython.core.displaypub import DisplayPublisher

    shell.display_pub = DisplayPublisher(parent=shell)
    shell.display_pub.shell = shell
    shell.config.pop("IPKernelApp", None)  # by this entry tqdm.auto and others recognize a notebook
    bars = sys.modules.get("tqdm.notebook")
    if bars is None:
        return
    # A cell may have imported tqdm's notebook bar already; without its own methods it is the plain text bar.
    for name, value in tuple(vars(bars.tqdm_notebook).items()):
        if callable(value) or isinstance(value, (staticmethod, property)):
            with contextlib.suppress(AttributeError):
                delattr(bars.tqdm_notebook, name)


def call_and_report(
    function: Callable[..., object], args: Sequence[object], folder: Path, rank: int, *, is_copy: bool = False
) -> int:
    """Call the function, write its result and return the exit code; 1 after an exception, whose traceback it prints."""
    try:
        result = function(*args)
        write_result(folder, rank, result, is_copy=is_copy)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # reported to the parent, which raises
        traceback.print_exc()
        return 1
    finally:
        _leave_world()
    return 0


def _leave_world() -> None:
    world = sys.modules.get("accelerate.distributed.world")
    if world is not None:
        world.leave_world()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def write_result(folder: Path, rank: int, result: object, *, is_copy: bool = False) -> None:
    """Write what this rank returned for the parent to read; for None no file is written.

    A copy of the parent names the classes that both know, so that the parent gets instances of its own. Without
    cloudpickle, only what has an exact form without pickle passes: tensors, numbers, text, and containers of them.
    """
    if result is None:
        return
    path = folder / f"result_{rank}"
    if not is_installed("cloudpickle"):
        from ..checkpointing.codec import EncodingError, encode, inline

        try:
            path.write_text(json.dumps(inline(encode(result, "result"))), encoding="utf-8")
        except EncodingError as error:
            if rank == 0:
                remedy = 'Install cloudpickle to get it: pip install "accelerate[notebook]". None is returned instead.'
                print(f"{error} {remedy}", file=sys.stderr)
        return
    if is_copy:
        with contextlib.suppress(Exception):  # what only this rank has defined is pickled by value
            path.write_bytes(_pickle(result, by_name=True))
            return
    path.write_bytes(_pickle(result))


def _pickle(value: object, *, by_name: bool = False) -> bytes:
    """Pickle functions and classes of ``__main__`` with what they consist of, or by name.

    Code keeps the name of its file, which cloudpickle leaves out from 3.1.3 on: tracebacks find their lines by it.
    """

    @final
    class Pickler(require("cloudpickle", "notebook").CloudPickler):
        def reducer_override(self, value: object) -> object:
            if isinstance(value, CodeType):
                return _code_of_file, (*self.dispatch_table[CodeType](value), value.co_filename)
            return NotImplemented if by_name else super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _code_of_file(make: Callable[..., CodeType], parts: tuple[object, ...], filename: str) -> CodeType:
    return make(*parts).replace(co_filename=filename)


def read_result(folder: Path, rank: int) -> Any:
    """Load the rank's result, written by a child process into a folder of this user only."""
    path = folder / f"result_{rank}"
    if not path.exists():
        return None
    if is_installed("cloudpickle"):
        return require("cloudpickle").loads(path.read_bytes())
    from ..checkpointing.codec import decode, inlined_tensor

    content = json.loads(path.read_text(encoding="utf-8"))
    return decode(content["state"], partial(inlined_tensor, content))


def _interactive_sources() -> dict[str, list[str]]:
    """Return the source lines of code typed interactively, by file name, so that tracebacks elsewhere can show them."""
    found: dict[str, list[str]] = {}
    for name, entry in linecache.cache.items():
        if len(entry) == 4 and not os.path.exists(name):  # shorter entries are read from a file later
            found[name] = entry[2]
    return found


def write_function(folder: Path, function: Callable[..., object], args: Sequence[object]) -> None:
    """Pickle the function, its arguments and what it uses of ``__main__`` for a new process to load.

    Raises:
        LaunchError: it can't be pickled.
    """
    require("cloudpickle", "notebook", purpose="Starting fresh processes for a function")
    try:
        packed = _pickle((_interactive_sources(), function, tuple(args)))
    except Exception as error:  # any object on the way may fail to describe itself
        raise LaunchError(
            f"The function or its arguments can't be pickled for fresh processes: {error}. Create what can't be "
            "pickled (models on a device, open files, locks) inside the function."
        ) from error
    (folder / "function").write_bytes(packed)


@final
class PickledFunction:
    """A function pickled by value for spawned processes, as is its result."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._packed: bytes = _pickle(function)
        # torch's agent asks the function for its name
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.__qualname__: str = self.__name__

    def __call__(self, *args: object) -> bytes:
        return _pickle(require("cloudpickle").loads(self._packed)(*args))


def read_function(folder: Path) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Load the function and its arguments, in a process that was started for them."""
    cells, function, args = require("cloudpickle").loads((folder / "function").read_bytes())
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return function, args
