"""The program of one rank of a replay.

    python -m accelerate.guests.rewind.child FOLDER SCRIPT [the script's arguments]

FOLDER contains the `Request`. The rank writes the facts of each update into it, and ends at the requested one.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO, final

import torch

from ...accelerator import Accelerator
from ...checkpointing.manifest import updates_in
from ...checkpointing.series import inspect, list_checkpoints
from ...distributed.collectives import broadcast
from ...seams import LoopHook, function_of, load
from ...settings.env import read
from ...torch_private.modules import batch_fetchers
from .rerun import Facts, Request, RerunError
from .run_folder import updates_of

#: How long a rank that has ended waits for the others, whose collectives it is part of.
_OTHERS_SECONDS: Final = 30.0


class UpdateObserver(LoopHook):
    """The base class for what a replay records: a hook of the loop that returns facts for each update."""

    @abstractmethod
    def facts(self, update: int) -> Facts:
        """Return JSON values about the update that has ended; called on every rank."""


class Reached(BaseException):
    """The end of a replay in this process; no `except Exception` of a script catches it."""


@final
class Replay(LoopHook):
    """A hook that loads the checkpoint, counts updates, writes their facts, and ends the run.

    Args:
        ends: called at the requested update, on every rank, between two batches.
        is_opened: `ends` is called when the first pass begins, with the checkpoint loaded.
    """

    def __init__(
        self, run: Accelerator, folder: Path, request: Request, ends: Callable[[Replay], None], is_opened: bool
    ) -> None:
        self.run, self.request, self._folder, self._ends, self._is_opened = run, request, folder, ends, is_opened
        self.update = 0
        self.observer: UpdateObserver = load(request.observe)(run, request.options)
        self._is_loaded = not request.checkpoint
        self._is_changed = False
        self._is_open = False  # an optimizer has stepped since the last facts
        self._counted: object = None  # the optimizer that steps first
        self._logged: dict[int, dict[str, float]] = {}
        self._last_step: int | None = None
        self._file: TextIO = (folder / f"rank_{run.process_index}.jsonl").open("a")

    def begin_pass(self, loader: object) -> None:
        """End the update before; at first, load the checkpoint unless the script has, and apply the changes."""
        self.close()
        if not self._is_loaded:
            self.run.load_state(self.request.checkpoint)
        if not self._is_changed:
            self._is_changed = True
            change(self.run, self.request.changes)
        if self._is_opened:
            self._is_opened = False
            self._ends(self)

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Count from the checkpoint's updates on."""
        self._is_loaded = self._is_loaded or Path(folder).resolve() == Path(self.request.checkpoint)
        self.update = updates_in(details)

    def after_step(self, optimizer: object) -> None:
        """Count an update: a step of the optimizer that steps first."""
        if self._counted is None:
            self._counted = optimizer
        if optimizer is self._counted:
            self.close()
            self.update += 1
            self._is_open = True

    def between_batches(self, loader: object) -> None:
        """End the update."""
        self.close()

    def end_pass(self, loader: object) -> None:
        """End the update at the last batch of a pass."""
        self.close()

    def end_run(self) -> None:
        """End the last update."""
        self.close()

    def note(self, values: Mapping[str, object], step: int | None) -> None:
        """Keep the numbers that the script logs."""
        numbers = {name: number for name, value in values.items() if (number := as_number(value)) is not None}
        self._last_step = self.update if step is None else step
        self._logged.setdefault(self._last_step, {}).update(numbers)

    def close(self) -> None:
        """Write the facts of an update that has ended, and end the run if it is the requested one."""
        if not self._is_open:
            return
        self._is_open = False
        facts = {"update": self.update, **self.observer.facts(self.update), "logged": self._logged}
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()
        self._logged = {}
        until, until_step = self.request.until_update, self.request.until_step
        has_logged = until_step is not None and self._has_logged(until_step)
        if has_logged or (until is not None and self.update >= until):
            if self.request.save_to:
                self.run.project_configuration.automatic_checkpoint_naming = False
                self.run.save_state(self.request.save_to)
            self._ends(self)

    def _has_logged(self, step: int) -> bool:
        """Return whether rank 0 has logged ``step``; a collective, because the others may not log."""
        told = torch.tensor(self._last_step is not None and self._last_step >= step, device=self.run.device)
        return bool(broadcast(told.float(), world=self.run.world))

    def give_up(self) -> None:
        """Write the facts of an update in which the script has failed."""
        self.update += not self._is_open
        facts = {"update": self.update, **self.observer.facts(self.update), "logged": {}, "has_failed": True}
        self._file.write(json.dumps(facts) + "\n")
        self._file.close()

    def end_process(self) -> None:
        """End the process without the rest of the script; ranks that are late still find this one."""
        self._file.close()
        (self._folder / f"ended_{self.run.process_index}").touch()
        end = function_of("scripts", "end_with_others", "A replay")
        end(self._folder, "ended_*", self.run.num_processes, _OTHERS_SECONDS)


def as_number(value: object) -> float | None:
    """Return a number, or a tensor of one element, as a float; None for other values."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    item = getattr(value, "item", None)
    value = item() if callable(item) and getattr(value, "size", 0) == 1 else value
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def change(run: Accelerator, changes: Mapping[str, float]) -> None:
    """Set options of all optimizers; a schedule of the learning rate goes on in proportion.

    Raises:
        RerunError: no optimizer has such an option.
    """
    for name, value in changes.items():
        groups = [group for optimizer in run._optimizers for group in optimizer.param_groups if name in group]
        if not groups:
            known = {str(key) for one in run._optimizers for group in one.param_groups for key in group} - {"params"}
            raise RerunError(f"--with {name}={value}: no optimizer has such an option. They have {', '.join(known)}.")
        factor = value / groups[0][name] if groups[0][name] else 1.0
        for group in groups:
            group[name] = value
            if name == "lr" and "initial_lr" in group:
                group["initial_lr"] *= factor
        for scheduler in run._schedulers if name == "lr" else ():
            inner: Any = getattr(scheduler, "scheduler", scheduler)
            inner.base_lrs = [rate * factor for rate in getattr(inner, "base_lrs", [])]


def wrap(owner: object, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function or method of ``owner`` by ``wrapped(function)``."""
    before: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(wrapped(before)))


def prepare(folder: Path, ends: Callable[[Replay], None], *, is_opened: bool = False) -> list[Replay]:
    """Give this process the replay's conditions; return the list that the hooks of its Accelerators are added to."""
    request, hooks = Request.read(folder), list[Replay]()

    def making(make: Callable[..., None]) -> Callable[..., None]:
        def made(run: Accelerator, *args: object, **kwargs: object) -> None:
            make(run, *args, **kwargs)
            hooks.append(Replay(run, folder, request, ends, is_opened))
            for hook in (hooks[-1], hooks[-1].observer):
                run.gradient_state.hooks.add(hook)

        return made

    def logging(_: object) -> Callable[..., None]:
        def log(run: Accelerator, values: Mapping[str, object], step: int | None = None, **__: object) -> None:
            for hook in hooks:
                if hook.run is run:
                    hook.note(values, step)

        return log

    def fetching(fetch: Callable[..., object]) -> Callable[..., object]:
        def fetched(fetcher: object, index: object) -> object:
            if isinstance(index, list):
                index = [one for one in index if int(one) not in left_out] or index
            return fetch(fetcher, index)

        return fetched

    wrap(Accelerator, "__init__", making)
    wrap(Accelerator, "init_trackers", lambda _: lambda *_, **__: None)  # a replay isn't a run of a tracking service
    wrap(Accelerator, "log", logging)
    left_out = frozenset(request.without_samples)
    if left_out:
        wrap(batch_fetchers()[0], "fetch", fetching)
    function_of("scripts", "keep_files", "A replay")(folder)
    hidden = folder / "hidden"
    if read("LOCAL_RANK", "0") == "0":
        _hide_newer(Path(request.project), request.checkpoint)
        hidden.touch()
    while not hidden.exists():
        time.sleep(0.02)
    return hooks


def _hide_newer(project: Path, checkpoint: str) -> None:
    """Hide checkpoints newer than the one to start from; the files are those of a mirror by now."""
    start = updates_of(inspect(checkpoint)) if checkpoint else -1
    for entry in list_checkpoints(project):
        if updates_of(entry) > start:
            shutil.rmtree(str(entry.storage), ignore_errors=True)


def run_script(words: list[str]) -> None:
    """Run a script, or a module after ``-m``, as the program of this process."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0:0] = [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    function_of("scripts", "main_program", "A replay")(Path(words[0]), words)()


def main(arguments: list[str]) -> None:
    """Run the script as the program of this process."""
    folder = Path(arguments[0])
    hooks = prepare(folder, Replay.end_process)
    try:
        run_script(arguments[1:])
    except BaseException as error:  # whatever ends the script, the facts of its last update are kept
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            for hook in hooks:
                hook.give_up()
            raise
    for hook in hooks:
        hook.close()


if __name__ == "__main__":
    from accelerate.guests.rewind import child  # not this copy of it

    child.main(sys.argv[1:])
