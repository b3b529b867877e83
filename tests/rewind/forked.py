"""Ranks of a script that are forked from the test's process, which has imported torch already, in place of a launch."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from accelerate.commands.main import main
from accelerate.guests.rewind import child, rerun
from accelerate.guests.rewind.rerun import split_command
from accelerate.ports import get_free_port
from tests.ranks import _environment, _forget_the_parents_world

_CHILD: Final = "accelerate.guests.rewind.child"
#: The variables that the launcher sets for the flags of the corpus.
_VARIABLES: Final = {
    "--use_fsdp": ("ACCELERATE_USE_FSDP", "true"),
    "--fsdp_version": ("FSDP_VERSION", "2"),
    "--fsdp_auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
    "--fsdp_min_num_params": ("FSDP_MIN_NUM_PARAMS", "1"),
}
_SECONDS: Final = 300


def start(words: Sequence[str], variables: Mapping[str, str], folder: str | None, output: Path) -> int:
    """Run `python -m accelerate.commands.launch ...` as forked ranks; return 1 if one failed, else 0."""
    flags, program = split_command(words[2:])
    ranks = int(flags[flags.index("--num_processes") + 1])
    extra = dict(variables) | dict(_VARIABLES[flag] for flag in flags if flag in _VARIABLES)
    port = get_free_port()
    context = multiprocessing.get_context("fork")
    environments = [_environment(rank, ranks, port, extra) for rank in range(ranks)]
    processes = [context.Process(target=_rank, args=(program, one, folder, output)) for one in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return int(any(process.exitcode for process in processes))


def command(words: list[str], text: str, output: Path) -> str:
    """Run a command of `accelerate` in a forked process, with what is typed into it, and return what it prints."""
    process = multiprocessing.get_context("fork").Process(target=_command, args=(words, text, output))
    process.start()
    process.join(_SECONDS)
    told = output.read_text()
    assert process.exitcode == 0, told[-4000:]
    return told


def _redirect(output: Path) -> None:
    with output.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def _command(words: list[str], text: str, output: Path) -> None:
    _redirect(output)
    sys.stdin = io.StringIO(text)
    rerun.start = start
    torch.set_num_threads(1)
    _forget_the_parents_world()
    _end(lambda: main(words))


def _end(function: Callable[[], object]) -> None:
    """End this process with what a function returns."""
    code: object = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def _rank(program: list[str], environment: dict[str, str], folder: str | None, output: Path) -> None:
    os.environ.update(environment)
    _redirect(output)
    if folder is not None:
        os.chdir(folder)
    torch.set_num_threads(1)
    _forget_the_parents_world()
    is_child = program[:2] == ["-m", _CHILD]
    _end(lambda: child.main(program[2:]) if is_child else child.run_script(program))
