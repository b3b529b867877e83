"""The program that runs a script for some steps and records its training.

    python -m accelerate.guests.scripts.verify.observe FOLDER SOURCE SCRIPT [the script's arguments]

SOURCE, the original or its conversion, runs as if it were SCRIPT. FOLDER contains the `Conditions` of the run, and
every process that trains writes a `Record` into it.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

import torch.multiprocessing

from ....errors import PreparationError
from . import surroundings
from .record import REFUSAL, Conditions
from .recorder import Recorder
from .wrapping import main_program, wrap


@contextlib.contextmanager
def observing(folder: Path, script: Path) -> Iterator[None]:
    """Observe this process, and write the record if the program ends before the last step."""
    conditions = Conditions.read(folder)
    datasets: list[object] = []
    recorder = Recorder(folder, script, conditions, datasets)
    surroundings.apply(conditions, folder, script, datasets)
    recorder.install()  # outside of the conditions, so that it sees what the script itself gives
    wrap(  # its processes are observed too
        torch.multiprocessing,
        "spawn",
        lambda spawn, fn, args=(), *rest, **kwargs: spawn(_observed, (folder, script, fn, *args), *rest, **kwargs),
    )
    try:
        yield
    except BaseException as error:  # also SystemExit: a script may end its evaluation by it
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            if recorder.has_finished:
                lines = [
                    each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(script)
                ]
                where = f"line {lines[-1]}: " if lines else ""
                recorder.fail(f"{where}{type(error).__name__}: {error}")
            if isinstance(error, PreparationError):
                (folder / REFUSAL).write_text(str(error))
            raise
    recorder.write()


def _observed(index: int, folder: Path, script: Path, function: Callable[..., object], *args: object) -> None:
    with observing(folder, script):
        function(index, *args)


def _print_from(script: str, kind: type[BaseException], error: BaseException, first: TracebackType | None) -> None:
    """Print an error as Python does, from the first frame of the script on."""
    while first is not None and first.tb_frame.f_code.co_filename != script:
        first = first.tb_next
    sys.__excepthook__(kind, error.with_traceback(first or error.__traceback__), None)


def main(arguments: list[str]) -> None:
    """Run the source as the program of this process."""
    folder, source, script = map(Path, arguments[:3])
    sys.excepthook = partial(_print_from, str(script))
    run = main_program(source, [str(script), *arguments[3:]])
    with observing(folder, script):
        run()


if __name__ == "__main__":
    from accelerate.guests.scripts.verify import observe  # not this copy of it

    observe.main(sys.argv[1:])
