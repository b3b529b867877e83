"""A run opened in this process before one of its updates: model, optimizer and loader as they were."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ...errors import SettingError
from ...seams import function_of, guests
from .rerun import Request, RerunError, split_command
from .run_folder import LOCK, path_of, updates_of
from .updates import is_written

if TYPE_CHECKING:
    from .search import Search

BRANCH: Final = "branch.json"
_LOG: Final = "log.jsonl"
#: Folders of opened runs, which are removed when this process ends.
_open: Final[list[tempfile.TemporaryDirectory[str]]] = []


def state_before(search: Search, update: int) -> Path | None:
    """Return a checkpoint of the state before an update, the run's own or that of a replay; None at the beginning.

    Raises:
        RerunError: the run ends earlier.
    """
    entries = [entry for entry in search.run.checkpoints if updates_of(entry) <= update - 1]
    newest = entries[-1] if entries else None
    if updates_of(newest) == update - 1:
        return path_of(newest)
    return search.state_after(update - 1, path_of(newest))


def open_at(
    run: str | Path,
    update: int,
    command: Sequence[str] = (),
    *,
    num_processes: int | None = None,
    samples: Sequence[int] = (),
) -> dict[str, Any]:
    """Run a script in this process up to the state before an update, and return its names.

    These are the script's own, and ``accelerator``, ``model``, ``optimizer``, ``scheduler`` and ``loader`` as they are
    prepared; the next batch of ``loader`` is the one of the update. With ``samples``, ``batch`` has these samples. What
    this process writes to files from now on goes to a temporary folder.

    Args:
        command: the run's command; by default the one in its folder.
        num_processes: the ranks of a replay up to the update; this process itself is one rank.
    """
    from .bisect_command import search_of

    _open.append(tempfile.TemporaryDirectory(prefix="accelerate_replay_"))
    workspace = Path(_open[-1].name)
    search = search_of(Path(run), command, num_processes, workspace)
    state = state_before(search, update)
    folder = workspace / "opened"
    folder.mkdir()
    Request(str(Path(run).resolve()), "" if state is None else str(state.resolve())).write(folder)
    names = _run_until(folder, split_command(search.command)[1], update)
    loader = names["loader"]
    if samples:
        from ...nested import send_to_device

        outside = [sample for sample in samples if not -len(loader.dataset) <= sample < len(loader.dataset)]
        if outside:
            raise SettingError(f"--samples {outside[0]}: the data set has {len(loader.dataset)} samples, from 0 on.")
        rows = [loader.dataset[sample] for sample in samples]
        names["batch"] = send_to_device(loader.collate_fn(rows), names["accelerator"].device)
    return names


def _run_until(folder: Path, program: list[str], update: int) -> dict[str, Any]:
    """Run the program until its first pass over a loader begins, and return its names."""
    from . import child

    main, arguments = sys.modules["__main__"], list(sys.argv)

    def stop(replay: child.Replay) -> None:
        raise child.Reached

    hooks = child.prepare(folder, stop, is_opened=True)
    names: dict[str, Any] = {}
    try:
        child.run_script(program)
    except child.Reached as reached:
        names |= vars(sys.modules["__main__"]) | _locals_of(reached.__traceback__, program)
    finally:
        sys.modules["__main__"], sys.argv[:] = main, arguments
    if not hooks or not names:
        raise RerunError(
            f"Update {update} isn't reached: after update {update - 1}, {' '.join(program)} ended without a pass over "
            "a prepared loader."
        )
    run = hooks[-1].run
    prepared = {
        "accelerator": [run],
        "model": run._wrapped_models,
        "optimizer": run._optimizers,
        "scheduler": run._schedulers,
        "loader": run._dataloaders,
    }
    return names | {name: values[0] for name, values in prepared.items() if values}


def _locals_of(trace: TracebackType | None, program: list[str]) -> dict[str, Any]:
    """Return the local variables of the script's functions that were running, the innermost last."""
    names: dict[str, Any] = {}
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == program[0]:
            names |= trace.tb_frame.f_locals
        trace = trace.tb_next
    return names


def branch(
    search: Search,
    update: int,
    folder: Path,
    *,
    until: int | None = None,
    without_samples: Sequence[int] = (),
    changes: Mapping[str, float] | None = None,
) -> None:
    """Run on from the state before an update with something changed, into a folder that says where it comes from.

    Raises:
        SettingError: the folder is there, or no sample to be left out is drawn.
        RerunError: the script failed before the update.
    """
    if folder.exists():
        raise SettingError(f"{folder} is there already. Give another folder for the branch (--branch).")
    state = state_before(search, update)
    updates = search.replay(state, until, without_samples=list(without_samples), changes=dict(changes or {}))
    assert search.last is not None, "replayed above"
    if not any(one.number >= update and not one.ranks[0].get("has_failed") for one in updates):
        raise RerunError(f"The script failed before the end of update {update}.{search.last.last_lines}")
    drawn = {
        sample
        for one in updates
        for rank in one.ranks
        for batch in rank.get("batches", ())
        for sample in batch["samples"]
    }
    absent = sorted(set(without_samples) - drawn) if drawn else []
    if absent:
        raise SettingError(
            f"--without_samples {','.join(map(str, absent))}: no such sample is in updates {update} to "
            f"{updates[-1].number}, so leaving it out changes nothing there."
        )
    folder.mkdir(parents=True)
    written = search.last.mirrored(search.run.path)
    for path in sorted(written.rglob("*")):  # folders first
        target = folder / path.relative_to(written)
        if (to := search.last.link_of(path)) is not None:
            run, place = search.run.path.resolve(), path.parent.relative_to(written)
            target.symlink_to(os.path.relpath(to, run / place) if to.is_relative_to(run) else to)
        elif path.name == LOCK or not is_written(path, search.last):  # the record is that of the run
            continue
        elif path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, target)
    origin = {
        "run": str(search.run.path.resolve()),
        "update": update,
        "command": _without_secrets(search.command),
        "without_samples": list(without_samples),
        "with": dict(changes or {}),
    }
    (folder / BRANCH).write_text(json.dumps(origin, indent=1) + "\n")
    lines = [{"step": step, **values} for one in updates for step, values in one.logged.items()]
    lines = lines or [{"step": one.number, **one.values} for one in updates]
    (folder / _LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _without_secrets(command: Sequence[str]) -> list[str]:
    """Return the command as a record has it; without the guest that knows secrets, the script alone."""
    if "reproduce" not in guests():
        return split_command(command)[1][:1]
    masked: list[str] = function_of("reproduce", "masked_arguments", "A branch")(command)
    return masked


def notebook(run: Path, update: int, command: Sequence[str], samples: Sequence[int]) -> dict[str, Any]:
    """Return a notebook that opens the run before an update."""
    given = f"{str(run.resolve())!r}, {update}, {list(command)!r}" + (f", samples={list(samples)!r}" if samples else "")
    title = (
        f"# {run.name} before update {update}\n\nThe run's files don't change: what this notebook writes goes to a "
        "temporary folder."
    )
    cells = (
        f"from accelerate.guests.rewind.position import open_at\n\nnames = open_at({given})\n"
        "accelerator, model, optimizer = names['accelerator'], names['model'], names['optimizer']\n"
        "loader = names['loader']",
        "batch = names.get('batch')\nif batch is None:  # that of the update\n    batch = next(iter(loader))\nbatch",
    )
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    return {
        "cells": [
            {"cell_type": "markdown", "id": "0", "metadata": {}, "source": title},
            *({**code, "id": str(number), "source": text} for number, text in enumerate(cells, start=1)),
        ],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
