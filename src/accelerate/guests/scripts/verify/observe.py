"""The program that runs a script for some steps and records its training.

    python -m accelerate.guests.scripts.verify.observe FOLDER SOURCE SCRIPT [the script's arguments]

SOURCE, the original or its conversion, runs as if it were SCRIPT. FOLDER contains the `Conditions` of the run, and
every process that trains writes a `Record` into it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import torch
import torch.multiprocessing
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ....accelerator import Accelerator
from ....plugins.data import DataLoaderConfiguration
from ....training.optimizer import AcceleratedOptimizer

CONDITIONS: Final = "conditions.json"
_OTHERS_SECONDS: Final = 20.0  # how long a rank that has finished waits for the others, whose collectives it is part of
_BATCH_NORMS: Final = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@final
@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    Attributes:
        num_steps: the number of optimizer steps after which to end.
        splits_batches: several processes share each batch of the script, and loaders give only full batches.
    """

    num_steps: int
    splits_batches: bool

    @classmethod
    def read(cls, folder: Path) -> Conditions:
        """Read the conditions from `folder`."""
        return cls(**json.loads((folder / CONDITIONS).read_text()))

    def write(self, folder: Path) -> None:
        """Write the conditions to `folder`."""
        (folder / CONDITIONS).write_text(json.dumps(asdict(self)))


@final
@dataclass
class Record:
    """The record of one process.

    Attributes:
        losses: the loss of each backward pass.
        weights: the sum of each trained parameter, and the sum of its absolute values, after the last step.
        draws: random numbers were drawn between two backward passes of one pass over a loader.
        normalizes: a layer normalises over its process's batch.
        is_rounded: the forward pass ran in bfloat16 or float16.
    """

    rank: int = 0
    num_processes: int = 1
    num_steps: int = 0
    losses: list[float] = field(default_factory=list[float])
    weights: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    draws: bool = False
    normalizes: bool = False
    is_rounded: bool = False

    @classmethod
    def read_all(cls, folder: Path) -> list[Record]:
        """Return the records in `folder`, by rank."""
        records = [cls(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
        return sorted(records, key=lambda record: record.rank)


@final
class Observer:
    """A recorder of this process's training that ends it after the last step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._conditions = Conditions.read(folder)
        self._record = Record()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._random_state: bytes | None = None  # at the last backward pass of this pass through a loader
        self._depth = 0

    def install(self) -> None:
        """Start to observe torch in this process."""
        torch.manual_seed(0)
        random.seed(0)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(0)
        _wrap(torch.autograd, "backward", self._recording)
        register_optimizer_step_post_hook(self._count_step)
        for name in _DROPOUTS:
            # Ranks draw different masks. A function for each name, since TorchDynamo knows functions by their identity.
            _wrap(torch.nn.functional, name, lambda _: lambda input, *_, **__: input)
        _wrap(torch.autocast, "__enter__", self._noting)
        _wrap(DataLoader, "__iter__", self._beginning)
        if self._conditions.splits_batches:
            _wrap(DataLoader, "__init__", _with_full_batches)
            _wrap(Accelerator, "__init__", _splitting)
        _keep_saves_in(self._folder)
        _without_cuda()
        _wrap(torch.multiprocessing, "spawn", partial(_spawning, self._folder))

    def write(self) -> None:
        """Write the record if this process has trained."""
        record = self._record
        if not record.losses:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            record.rank, record.num_processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    weight = parameter.detach().double()
                    record.weights.append((float(weight.sum()), float(weight.abs().sum())))
        record.normalizes = any(issubclass(type(found), _BATCH_NORMS) and found.training for found in gc.get_objects())
        path = self._folder / f"rank_{record.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(record)))
        path.with_suffix(".part").replace(path)

    def _recording(self, backward: Callable[..., object]) -> Callable[..., object]:
        def recorded(tensors: torch.Tensor | Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
            if self._depth == 0:  # not when activation checkpointing recomputes a part
                each = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                self._record.losses.append(sum(float(tensor.detach().double().mean()) for tensor in each))
                self._note_draws()
            self._depth += 1
            try:
                backward(tensors, *args, **kwargs)
            finally:
                self._depth -= 1

        return recorded

    def _note_draws(self) -> None:
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()
        self._record.draws |= self._random_state not in (None, state)
        self._random_state = state

    def _noting(self, enter: Callable[..., object]) -> Callable[..., object]:
        def noting(context: object) -> object:
            entered = enter(context)
            self._record.is_rounded |= torch.is_autocast_enabled("cpu")
            return entered

        return noting

    def _beginning(self, begin: Callable[..., object]) -> Callable[..., object]:
        def beginning(loader: object) -> object:
            self._random_state = None  # the order of a shuffled pass is drawn when it begins
            return begin(loader)

        return beginning

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):  # whose own optimizer is counted
            return
        self._optimizers[id(optimizer)] = optimizer
        self._record.num_steps += 1
        if self._record.num_steps < self._conditions.num_steps:
            return
        self.write()
        self._wait_for_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # don't run the end of the script, which writes files

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < until and len(list(self._folder.glob("rank_*.json"))) < self._record.num_processes:
            time.sleep(0.02)


def _wrap(owner: object, name: str, wrapped: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
    """Replace a function or method of `owner` by `wrapped(function)`."""
    before: Callable[..., object] = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(wrapped(before)))


# -- the same conditions for all runs ----------------------------------------------------------------------


def _with_full_batches(make: Callable[..., object]) -> Callable[..., object]:
    """Return a loader constructor with batches of an even size, without the last one of a pass."""

    def made(loader: object, dataset: Sized, batch_size: int | None = 1, *args: object, **kwargs: object) -> None:
        if batch_size is not None and kwargs.get("batch_sampler") is None and len(args) < 3:
            batch_size += batch_size % 2
            with contextlib.suppress(TypeError):  # a stream has no length
                if len(dataset) >= batch_size:
                    kwargs["drop_last"] = True
        make(loader, dataset, batch_size, *args, **kwargs)

    return made


def _splitting(make: Callable[..., object]) -> Callable[..., object]:
    """Return a constructor of Accelerators that split each batch of the script."""

    def made(accelerator: object, *args: object, **kwargs: object) -> None:
        given = kwargs.get("dataloader_config")
        configuration = given if isinstance(given, DataLoaderConfiguration) else DataLoaderConfiguration()
        configuration.split_batches = True
        make(accelerator, *args, **{**kwargs, "dataloader_config": configuration})

    return made


def _keep_saves_in(folder: Path) -> None:
    """Save the script's files in `folder`, whether by torch or by the Accelerator, so that no checkpoint changes."""

    def place(file: object) -> object:
        if not isinstance(file, (str, os.PathLike)):
            return file
        name = hashlib.sha256(os.path.abspath(os.fspath(file)).encode()).hexdigest()
        return folder / f"saved_{name}.pt"

    def saving(save: Callable[..., object]) -> Callable[..., object]:
        return lambda obj, f, *args, **kwargs: save(obj, place(f), *args, **kwargs)

    def writing(write: Callable[..., object]) -> Callable[..., object]:
        return lambda accelerator, obj, f, *args, **kwargs: write(accelerator, obj, place(f), *args, **kwargs)

    def loading(load: Callable[..., object]) -> Callable[..., object]:
        def load_from_there(f: object, *args: object, **kwargs: object) -> object:
            saved = place(f)
            return load(saved if isinstance(saved, Path) and saved.exists() else f, *args, **kwargs)

        return load_from_there

    _wrap(torch, "save", saving)
    _wrap(torch, "load", loading)
    _wrap(Accelerator, "save", writing)


@final
class _OnHost(TorchFunctionMode):
    """A mode that computes on the CPU, for scripts with the name of a missing GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_host, args[1:]))
        return func(*args, **kwargs)


def _on_host(value: object) -> object:
    if isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "cuda":
        return torch.device("cpu")
    return value


def _without_cuda() -> None:
    """Let a script that uses GPUs run without one."""
    if torch.cuda.is_available():
        return
    _OnHost().__enter__()
    for name in ("set_device", "synchronize"):
        _wrap(torch.cuda, name, lambda _: lambda *_, **__: None)
    _wrap(torch.nn.Module, "cuda", lambda _: lambda module, *_, **__: module)
    _wrap(torch.distributed, "init_process_group", _through_gloo)
    _wrap(torch.nn.parallel.DistributedDataParallel, "__init__", _without_device_ids)


def _through_gloo(begin: Callable[..., object]) -> Callable[..., object]:
    def begun(backend: str | None = None, *args: object, **kwargs: object) -> None:
        begin("gloo" if backend == "nccl" else backend, *args, **{**kwargs, "device_id": None})

    return begun


def _without_device_ids(make: Callable[..., object]) -> Callable[..., object]:
    def made(
        ddp: object,
        module: object,
        device_ids: object = None,
        output_device: object = None,
        *rest: object,
        **options: object,
    ) -> None:
        make(ddp, module, None, None, *rest, **options)

    return made


def _spawning(folder: Path, spawn: Callable[..., object]) -> Callable[..., object]:
    """Return `spawn` with processes that are observed too."""
    return lambda fn, args=(), *rest, **kwargs: spawn(_observed, (folder, fn, *args), *rest, **kwargs)


def _observed(index: int, folder: Path, function: Callable[..., object], *args: object) -> None:
    with observing(folder):
        function(index, *args)


# -- the program -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def observing(folder: Path) -> Iterator[None]:
    """Observe this process, and write the record if the program ends before the last step."""
    observer = Observer(folder)
    observer.install()
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    observer.write()


def main(arguments: list[str]) -> None:
    """Run the source as the program of this process."""
    folder, source, script = map(Path, arguments[:3])
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    sys.argv[:] = [str(script), *arguments[3:]]
    sys.path[0:0] = [str(script.resolve().parent)]
    with observing(folder):
        exec(compile(source.read_bytes(), str(script), "exec"), module.__dict__)


if __name__ == "__main__":
    from accelerate.guests.scripts.verify import observe  # not this copy of it

    observe.main(sys.argv[1:])
