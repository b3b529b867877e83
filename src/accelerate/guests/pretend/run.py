"""Run a script as one rank of a simulated job."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, final
from unittest.mock import patch

import safetensors.torch
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...accelerator import Accelerator
from ...distributed.environment import detect
from ...distributed.pretended import AnsweringStore
from ...settings import env
from ...torch_private.tracing import Operator, fake_backend, operator_name, tree_leaves
from .communication import CollectiveCounter, PretendedReducer, without_others
from .records import MemoryRecord, SampleRecord
from .report import Report, report_of
from .tensors import ValuelessMode

_MOST_REFUSALS: Final = 3
#: Operators whose number of random draws depends on the values of their inputs.
_DRAW_BY_VALUES: Final = {"binomial", "poisson", "rrelu_with_noise", "sample_dirichlet", "standard_gamma"}


@final
class _Ended(SystemExit):
    """The signal that the requested steps are done."""


@final
class PretendedRun:
    """One rank's run: the objects that it prepares, its computation and its communication, until the last step."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.accelerators: list[Accelerator] = []
        self.memory: MemoryRecord = MemoryRecord()
        self.samples: SampleRecord = SampleRecord()
        self.collectives: CollectiveCounter = CollectiveCounter()
        #: The collectives of `prepare`.
        self.preparation: CollectiveCounter = CollectiveCounter()
        self.saves: list[str] = []
        #: Operations with an unknown number of random draws.
        self.uncounted: set[str] = set()
        self.mode: ValuelessMode = ValuelessMode(self)
        self.report: Report | None = None
        self._steps: dict[int, int] = {}  # by optimizer
        self._num_refusals = 0  # how often the script continued when it had to end

    @property
    def steps(self) -> int:
        """The number of optimizer steps that were run."""
        return max(self._steps.values(), default=0)

    def run(self, program: Sequence[str], *, is_module: bool) -> None:
        """Run the program with its arguments until it ends, or until the last step."""
        before, folders = sys.argv, list(sys.path)
        sys.argv = list(program)
        sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(program[0]).resolve().parent))
        # Begun before the mode, autograd has its threads and its thread-local state in order.
        torch.zeros((), requires_grad=True).backward()
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            with ExitStack() as held:
                self._enter(held)
                try:
                    if is_module:
                        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
                    else:
                        runpy.run_path(program[0], run_name="__main__")
                except _Ended:
                    pass
                if self.report is None:
                    self.report = report_of(self)
        finally:
            handle.remove()
            sys.argv, sys.path[:] = before, folders

    def _enter(self, held: ExitStack) -> None:
        held.enter_context(without_others(self._reducer))
        methods = {
            "prepare": self._preparing(Accelerator.prepare),
            "prepare_model": self.mode.calling(Accelerator.prepare_model),
            "init_trackers": _do_nothing,
            "log": _do_nothing,
            **{name: self._saving(name) for name in ("save_state", "load_state")},
            **{name: self._saving(name, 1) for name in ("save_model", "save", "export_model")},
        }
        held.enter_context(patch.multiple(Accelerator, **methods))
        # Tensors without values must not overwrite the user's files.
        held.enter_context(patch.object(torch, "save", self._saving_to_disk(torch.save)))
        held.enter_context(patch.object(safetensors.torch, "save_file", partial(self._saving("save_file", 1), None)))
        held.enter_context(self.samples.recording())
        held.enter_context(self.memory.following_storages())
        held.enter_context(self.mode.around_script())

    def _reducer(self, *args: Any) -> PretendedReducer:
        reducer = PretendedReducer(*args)
        self.memory.tracker.count(reducer.buffers, "gathered")
        return reducer

    def _preparing(self, prepare: Callable[..., object]) -> Callable[..., object]:
        def prepared(accelerator: Accelerator, *args: object, **kwargs: object) -> object:
            if accelerator not in self.accelerators:
                self.accelerators.append(accelerator)
            result = prepare(accelerator, *args, **kwargs)
            for model in accelerator._models:
                self.memory.count_model(model)
            self.memory.prepared()
            self.preparation.take(self.collectives)
            return result

        return prepared

    def _saving(self, name: str, position: int = 0) -> Callable[..., str]:
        def saved(accelerator: Accelerator | None, *args: object, **kwargs: object) -> str:
            del accelerator
            values = [*args, *kwargs.values()]
            target = str(values[position]) if len(values) > position else ""
            self.saves.append(f"{name}({target})")
            return target

        return saved

    def _saving_to_disk(self, save: Callable[..., None]) -> Callable[..., object]:
        listed = self._saving("torch.save", 1)

        def saved(obj: object, f: object, *args: object, **kwargs: object) -> object:
            return save(obj, f, *args, **kwargs) if isinstance(f, io.BytesIO) else listed(None, obj, f)

        return saved

    # -- what happens while it runs ------------------------------------------------------------------------

    def collective(self, func: Operator, args: tuple[object, ...]) -> None:
        """Count a collective, whose result may be gradients."""
        name = self.collectives.record(func, args)
        if name == "reduce-scatter" and func.namespace == "c10d":
            self.memory.tracker.count(tree_leaves(args[0]), "gradients")

    def drawn(self, func: Operator) -> None:
        """Record an operation whose number of random draws depends on missing values."""
        if (name := operator_name(func).strip("_")) in _DRAW_BY_VALUES:
            self.uncounted.add(name)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self.memory.count_step(optimizer)
        if not self._is_done():
            return
        if self.report is None:
            self.report = report_of(self)
        self._num_refusals += 1
        if self._num_refusals > _MOST_REFUSALS:  # the script catches even this
            print(self.report, flush=True)
            os._exit(0)
        raise _Ended(0)

    def _is_done(self) -> bool:
        """Return whether each prepared optimizer has made the steps, or one of them twice as many."""
        prepared = {id(each.optimizer) for one in self.accelerators for each in one._optimizers}
        fewest = min((self._steps.get(each, 0) for each in prepared or self._steps), default=0)
        return fewest >= self.num_steps or self.steps >= 2 * self.num_steps


def _do_nothing(*_: object, **__: object) -> None:
    """Replace a call that would reach a tracking service."""


def run_as_rank(program: Sequence[str], num_steps: int, *, is_module: bool = False) -> Report:
    """Run the program as the rank named by the environment, in a simulated world, and return the report."""
    identity = detect(env.snapshot())
    assert identity is not None, "the launcher has set RANK and WORLD_SIZE"
    store = AnsweringStore(identity.size)
    dist.init_process_group(fake_backend(), rank=identity.rank, world_size=identity.size, store=store)
    run = PretendedRun(num_steps)
    run.run(program, is_module=is_module)
    assert run.report is not None
    return run.report
