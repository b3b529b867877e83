"""The program that runs a script for some steps and records how it trains.

    python -m accelerate.tools.migrate.observe FOLDER SOURCE SCRIPT [the script's arguments]

SOURCE is run as if it were SCRIPT: the original, or its conversion. FOLDER holds the `Conditions` of the run, and
every process that trains writes a `Record` there.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

CONDITIONS: Final = "conditions.json"
_OTHERS_SECONDS: Final = 20.0  # how long a rank that has finished waits for the others, whose collectives it is part of
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@final
@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    Attributes:
        num_steps: end after so many steps of an optimizer.
        splits_batches: several processes share each batch of the script, and loaders give full batches only.
    """

    num_steps: int
    splits_batches: bool

    @classmethod
    def read(cls, folder: Path) -> Conditions:
        """Return the conditions that were written to `folder`."""
        return cls(**json.loads((folder / CONDITIONS).read_text()))

    def write(self, folder: Path) -> None:
        """Write the conditions to `folder`."""
        (folder / CONDITIONS).write_text(json.dumps(asdict(self)))


@final
@dataclass
class Record:
    """The record of one process.

    Attributes:
        losses: the value that each backward pass began with.
        weights: of each trained parameter the sum, and the sum of its absolute values, after the last step.
        draws: random numbers were drawn between two backward passes of one pass through a loader.
        normalizes: a layer normalises over the batch of its process.
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
    """Record the training of this process, and end it after the last step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._conditions = Conditions.read(folder)
        self._record = Record()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._random_state: bytes | None = None  # at the last backward pass of this pass through a loader
        self._depth = 0

    def install(self) -> None:
        """Observe torch in this process from now on."""
        torch.manual_seed(0)
        random.seed(0)
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.seed(0)
        _put(torch.autograd, "backward", self._recording(torch.autograd.backward))
        register_optimizer_step_post_hook(self._count_step)
        for name in _DROPOUTS:
            # Ranks draw different masks. A function for each name, since TorchDynamo knows functions by their identity.
            _put(torch.nn.functional, name, lambda input, *_, **__: input)
        _put(torch.autocast, "__enter__", self._noting(torch.autocast.__enter__))
        _put(DataLoader, "__iter__", self._beginning(DataLoader.__iter__))
        if self._conditions.splits_batches:
            _put(DataLoader, "__init__", _with_full_batches(DataLoader.__init__))
            _split_batches()
        _keep_saves_in(self._folder)
        _without_cuda()
        _spawn_observed(self._folder)

    def write(self) -> None:
        """Write the record, where this process has trained."""
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
        record.normalizes = any(
            issubclass(type(found), torch.nn.modules.batchnorm._BatchNorm) and found.training
            for found in gc.get_objects()
        )
        path = self._folder / f"rank_{record.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(record)))
        path.with_suffix(".part").replace(path)

    def _recording(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._depth == 0:  # not where a checkpointed part is computed again
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

    def _noting(self, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noting(context: Any) -> Any:
            self._record.is_rounded |= context._enabled and context.fast_dtype != torch.float32
            return enter(context)

        return noting

    def _beginning(self, begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def beginning(loader: Any) -> Any:
            self._random_state = None  # the order of a shuffled pass is drawn when it begins
            return begin(loader)

        return beginning

    def _count_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if hasattr(optimizer, "optimizer"):  # a wrapper, whose own optimizer is counted
            return
        self._optimizers[id(optimizer)] = optimizer
        self._record.num_steps += 1
        if self._record.num_steps < self._conditions.num_steps:
            return
        self.write()
        self._wait_for_others()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing of the script's own ending, which writes files, is to run

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _OTHERS_SECONDS
        while time.monotonic() < until and len(list(self._folder.glob("rank_*.json"))) < self._record.num_processes:
            time.sleep(0.02)


def _put(owner: Any, name: str, value: object) -> None:
    """Put `value` in the place of an attribute of torch's or of the package, whose type it needn't have."""
    setattr(owner, name, value)


# -- the same conditions for all runs ----------------------------------------------------------------------


def _with_full_batches(make: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of loaders with batches of an even size, the last one of a pass left out."""

    @functools.wraps(make)
    def made(loader: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        if batch_size is not None and kwargs.get("batch_sampler") is None and len(args) < 3:
            batch_size += batch_size % 2
            with contextlib.suppress(TypeError):  # a stream has no length
                if len(dataset) >= batch_size and len(args) < 7:
                    kwargs["drop_last"] = True
        make(loader, dataset, batch_size, *args, **kwargs)

    return made


def _split_batches() -> None:
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    make = accelerate.Accelerator.__init__

    @functools.wraps(make)
    def made(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        configuration = kwargs.get("dataloader_config") or DataLoaderConfiguration()
        configuration.split_batches = True
        make(accelerator, *args, **{**kwargs, "dataloader_config": configuration})

    _put(accelerate.Accelerator, "__init__", made)


def _keep_saves_in(folder: Path) -> None:
    """Save in `folder` what the script saves with torch, or converted with the Accelerator: no checkpoint changes."""
    import accelerate

    save, load, write = torch.save, torch.load, accelerate.Accelerator.save

    def place(file: Any) -> Any:
        if not isinstance(file, (str, os.PathLike)):
            return file
        name = hashlib.sha256(os.path.abspath(os.fspath(file)).encode()).hexdigest()
        return folder / f"saved_{name}.pt"

    @functools.wraps(save)
    def save_aside(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, place(f), *args, **kwargs)

    @functools.wraps(load)
    def load_from_aside(f: Any, *args: Any, **kwargs: Any) -> Any:
        aside = place(f)
        return load(aside if isinstance(aside, Path) and aside.exists() else f, *args, **kwargs)

    @functools.wraps(accelerate.Accelerator.save)
    def write_aside(accelerator: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        write(accelerator, obj, place(f), *args, **kwargs)

    _put(accelerate.Accelerator, "save", write_aside)
    _put(torch, "save", save_aside)
    _put(torch, "load", load_from_aside)


@final
class _OnHost(TorchFunctionMode):
    """Compute on the CPU what a script means for a GPU that isn't there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_host, args[1:]))
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "cuda":
        return torch.device("cpu")
    return value


def _same_module(module: torch.nn.Module, device: object = None) -> torch.nn.Module:
    return module


def _without_cuda() -> None:
    """Let a script that names GPUs run where there is none."""
    if torch.cuda.is_available():
        return
    _OnHost().__enter__()
    for name in ("set_device", "synchronize"):
        _put(torch.cuda, name, lambda *_, **__: None)
    _put(torch.nn.Module, "cuda", _same_module)
    begin, make = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(begin)
    def begun(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin("gloo" if backend == "nccl" else backend, *args, **{**kwargs, "device_id": None})

    @functools.wraps(make)
    def made(model: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **kw: Any) -> None:
        make(model, module, None, None, *rest, **kw)

    _put(torch.distributed, "init_process_group", begun)
    _put(torch.nn.parallel.DistributedDataParallel, "__init__", made)


def _spawn_observed(folder: Path) -> None:
    """Observe the processes that the script spawns, too."""
    from torch import multiprocessing

    spawn: Callable[..., Any] = vars(multiprocessing)["spawn"]

    @functools.wraps(spawn)
    def spawned(fn: Any, args: tuple[Any, ...] = (), *rest: Any, **kwargs: Any) -> Any:
        return spawn(_observed, (folder, fn, *args), *rest, **kwargs)

    _put(multiprocessing, "spawn", spawned)


def _observed(index: int, folder: Path, function: Callable[..., Any], *args: Any) -> None:
    with observing(folder):
        function(index, *args)


# -- the program -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def observing(folder: Path) -> Iterator[None]:
    """Observe this process, and write the record if what runs ends before the last step."""
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
    from accelerate.tools.migrate import observe  # the module that spawned processes import, not this copy of it

    observe.main(sys.argv[1:])
