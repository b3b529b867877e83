"""What one process does, recorded by hooks on torch and on the Accelerator."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ....accelerator import Accelerator
from ....data_loader import PreparedLoader
from ....parallel.rebind import canonical_name
from ....torch_private.modules import batch_fetchers
from ....training.optimizer import AcceleratedOptimizer
from .evaluation_recorder import EvaluationRecorder, random_state
from .moments import Places
from .record import Conditions, Moments, Record, Step
from .wrapping import Call, caller, end_with_others, is_of_script, trainer_of, wrap

_OTHERS_SECONDS: Final = 20.0  # how long a rank that has finished waits for the others, whose collectives it is part of
_BATCH_NORMS: Final = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
#: Methods of the Accelerator, and what a script that calls one uses.
_CALLS: Final = {"accumulate": "accumulate", "maybe_context_parallel": "context", "pipeline_step": "pipeline"}
_WRAPPED: Final = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@final
class Recorder:
    """A recorder of this process's training, which ends the process after the last step.

    Args:
        datasets: the list for the datasets of the script's loaders, in the order of their creation.
    """

    def __init__(self, folder: Path, script: Path, conditions: Conditions, datasets: list[object]) -> None:
        self._folder, self._script, self._conditions = folder, str(script), conditions
        self._record = Record()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._random_state: bytes | None = None  # at the last backward pass of this pass through a loader
        self._depth = 0
        self._places = Places(takes_bits=bool(conditions.batch_parts))
        self._roots: dict[str, torch.nn.Module] | None = None
        self._made: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()  # modules, numbered
        self._num_made = 0
        self._loose: dict[str, torch.nn.Parameter] = {}  # trained parameters of no module
        self._accelerators: list[Accelerator] = []
        self._batch: list[int] = []  # the indices that were read last
        self._fetched: list[list[int]] = []  # the batches since the last backward pass
        self._read: list[list[int]] = []  # the batches of the backward passes so far
        self._before_clipping: dict[str, Moments | None] | None = None
        self._norm: float | None = None
        self._gradients: dict[str, Moments | None] = {}
        self._reduces = False  # the next backward pass averages gradients over the ranks
        self._num_reductions = 0  # since the last step
        self._num_clips = 0  # since the last step
        self._unscaled: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by scaled loss: a tuple of the loss
        self._line = 0  # of the script's last backward pass
        self._is_resumed = not conditions.resumes_from
        self._passes: list[object] = []  # the passes through prepared loaders that have begun, the outermost first
        self._datasets = datasets
        self._evaluations = EvaluationRecorder(self._record, datasets, self._line_of, self.end)

    # -- hooks -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Begin to record torch and the Accelerator in this process."""
        wrap(torch.autograd, "backward", self._recording)
        wrap(torch.amp.GradScaler, "scale", self._scaling)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(torch.autocast, "__enter__", self._noting)
        wrap(DataLoader, "__init__", self._making)
        wrap(DataLoader, "__iter__", self._beginning)
        wrap(Accelerator, "__init__", self._with_accelerator)
        for call, name in _CALLS.items():
            wrap(Accelerator, call, partial(self._using, name))
        wrap(Accelerator, "prepare_model", self._preparing)
        wrap(torch.distributed, "init_process_group", partial(self._using, "group"))
        if self._conditions.evaluates:
            self._evaluations.install()
        if self._conditions.keeps_tensors:
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                wrap(module, "clip_grad_norm_", self._clipping)
            wrap(Accelerator, "clip_grad_norm_", self._clipping)
            by_index, of_stream = batch_fetchers()
            wrap(by_index, "fetch", self._fetching)
            wrap(of_stream, "fetch", partial(self._using, "stream"))
            wrap(PreparedLoader, "__iter__", self._resuming)
            wrap(torch.nn.Module, "__init__", self._numbering)
            wrap(torch.nn.parallel.DistributedDataParallel, "forward", self._forwarding)

    def _numbering(self, make: Call, module: torch.nn.Module, *args: object, **kwargs: object) -> None:
        make(module, *args, **kwargs)
        self._made.setdefault(module, self._num_made)
        self._num_made += 1

    def _forwarding(
        self, forward: Call, replica: torch.nn.parallel.DistributedDataParallel, *args: object, **kwargs: object
    ) -> object:
        self._reduces |= replica.require_backward_grad_sync and torch.is_grad_enabled()
        return forward(replica, *args, **kwargs)

    def _scaling(self, scale: Call, scaler: torch.amp.GradScaler, outputs: object) -> object:
        result = scale(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(result, torch.Tensor):
            self._unscaled[result] = (outputs,)
        return result

    def _recording(
        self, backward: Call, tensors: torch.Tensor | Sequence[torch.Tensor], *args: object, **kwargs: object
    ) -> None:
        if self._depth == 0:  # not when activation checkpointing recomputes a part
            self._evaluations.note_backward()
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            each = [self._unscaled.get(tensor) or (tensor,) for tensor in given]
            self._record.losses.append(sum(float(tensor.detach().double().mean()) for (tensor,) in each))
            if "Trainer" in self._record.uses:  # it reads all batches of an update before the first pass
                self._read.extend(self._fetched)
            elif not self._read or self._read[-1] is not self._batch:  # a pipeline's batch has several passes
                self._read.append(self._batch)
            self._fetched.clear()
            self._num_reductions += self._reduces
            self._reduces = False
            self._line = self._line_of(sys._getframe(1))
            self._note_draws()
        self._depth += 1
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self._depth -= 1

    def _note_draws(self) -> None:
        state = random_state()
        self._record.draws |= self._random_state not in (None, state)
        self._random_state = state

    def _noting(self, enter: Call, context: object) -> object:
        entered = enter(context)
        self._record.is_rounded |= torch.is_autocast_enabled("cpu")
        return entered

    def _making(self, make: Call, *args: object, **kwargs: object) -> None:
        given = kwargs.get("batch_sampler", args[5] if len(args) > 5 else None)
        dataset = kwargs.get("dataset", args[1] if len(args) > 1 else None)
        if is_of_script(caller()):
            if given is not None:
                self._use("batch sampler")
            if not any(each is dataset for each in self._datasets):
                self._datasets.append(dataset)
        make(*args, **kwargs)

    def _beginning(self, begin: Call, loader: object) -> object:
        self._random_state = None  # the order of a shuffled pass is drawn when it begins
        self._evaluations.begin_pass()
        return begin(loader)

    def _use(self, name: str) -> None:
        if name not in self._record.uses:
            self._record.uses.append(name)

    def _using(self, name: str, call: Call, *args: object, **kwargs: object) -> object:
        self._use(name)
        return call(*args, **kwargs)

    def _with_accelerator(self, make: Call, accelerator: Accelerator, *args: object, **kwargs: Any) -> None:
        self._use("Accelerator")
        if trainer_of(sys._getframe(1)) is not None:
            self._use("Trainer")
        for axis, name in (("tp", "tensor plan"), ("ep", "expert plan")):
            handler = getattr(kwargs.get("parallelism_config"), f"{axis}_handler", None)
            if getattr(handler, "plan", None):
                self._use(name)
        make(accelerator, *args, **kwargs)
        self._accelerators.append(accelerator)

    def _preparing(
        self, prepare: Call, accelerator: Accelerator, model: torch.nn.Module, *args: object, **kwargs: object
    ) -> object:
        if getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None):
            self._use("tensor plan")
        return prepare(accelerator, model, *args, **kwargs)

    def _fetching(self, fetch: Call, fetcher: object, index: object) -> object:
        indices = getattr(index, "indices", index)  # those with a seed for each sample
        if isinstance(indices, list):
            self._batch = [one if isinstance(one, int) else int(one) for one in indices]
            self._fetched.append(self._batch)
            if self._conditions.reorders and index is indices:
                index = indices[::-1]
        return fetch(fetcher, index)

    def _clipping(self, clip: Call, *args: object, **kwargs: object) -> Any:
        if self._depth:
            return clip(*args, **kwargs)
        self._depth += 1
        try:
            if self._before_clipping is None:
                self._before_clipping = self._gradients_now()
            norm = clip(*args, **kwargs)
        finally:
            self._depth -= 1
        self._num_clips += 1
        self._norm = float(norm) if isinstance(norm, (int, float, torch.Tensor)) else None
        return norm

    # -- steps -----------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Note the gradients: now, or when the closure that computes them has run for the first time."""
        if isinstance(optimizer, AcceleratedOptimizer) or not self._conditions.keeps_tensors:
            return None
        self._know(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._note_gradients()
            return None
        is_noted = False

        def noting() -> object:
            nonlocal is_noted
            loss = closure()
            if not is_noted:
                self._note_gradients()
            is_noted = True
            return loss

        return (optimizer, noting), {key: value for key, value in kwargs.items() if key != "closure"}

    def _note_gradients(self) -> None:
        self._gradients = self._before_clipping if self._before_clipping is not None else self._gradients_now()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):  # whose own optimizer is counted
            return
        if self.has_finished:
            self.end()
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._record.num_steps += 1
        if self._conditions.keeps_tensors:
            self._keep(optimizer)
        if self._record.num_steps >= self._conditions.num_steps:
            if not self._conditions.evaluation_seconds:
                self.end()
            self._note_last_step()
            self._evaluations.wait(self._conditions.evaluation_seconds)

    @property
    def has_finished(self) -> bool:
        """Whether the last step is done, and the script goes on to an evaluation."""
        return self._evaluations.is_awaited

    def fail(self, why: str) -> None:
        """Note why the evaluation after the last step ended early, and end the process."""
        self._record.failure = why
        self.end()

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        number = next(n for n, known in enumerate(self._optimizers) if known is optimizer)
        names = self._names()
        trained = {names[id(one)]: one for one in _trained_by(optimizer)}
        is_flat = self._is_flat()
        gradients, norm = self._gradients, self._norm
        self._before_clipping, self._norm = None, None
        seen = sum(len(step.samples) for step in self._record.steps if step.optimizer == number)
        states = {
            f"{name}.{key}": value
            for name, parameter in trained.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        step = Step(
            number,
            self._read[seen:],
            {} if is_flat else {name: gradients.get(name) for name, one in trained.items() if one.requires_grad},
            norm,
            [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            self._weights_now(),
            {} if is_flat else {**self._places.moments_of(states)},
            [self._line_of(sys._getframe(1)), self._line],
            self._num_reductions,
            self._num_clips,
            self._accelerators[-1].fingerprint() if self._conditions.batch_parts and self._accelerators else "",
        )
        self._num_reductions = self._num_clips = 0
        self._record.steps.append(step)

    def _line_of(self, frame: FrameType | None) -> int:
        """Return the line of the script that is being run."""
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                return frame.f_lineno
            frame = frame.f_back
        return 0

    # -- models ----------------------------------------------------------------------------------------

    def _models(self) -> dict[str, torch.nn.Module]:
        """Return the models of this process by prefix: "" for a single one, else their classes' names."""
        if self._roots is None:
            objects = gc.get_objects()
            modules = [one for one in objects if issubclass(type(one), torch.nn.Module)]
            optimizers = [one for one in objects if issubclass(type(one), torch.optim.Optimizer)]
            trained = {
                id(p) for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]
            }
            inner = {id(child) for module in modules for child in module.children()}
            roots = [one for one in modules if id(one) not in inner and any(True for _ in one.parameters())]
            roots.sort(key=lambda root: (trained.isdisjoint(map(id, root.parameters())), self._number(root)))
            found: dict[str, torch.nn.Module] = {}
            known: set[int] = set()
            numbers = Counter[str]()
            for root in roots:
                own = {id(parameter) for parameter in root.parameters()}
                if own <= known:  # another wrapper around the same parameters
                    continue
                known |= own
                name = type(_unwrapped(root)).__name__.removeprefix("FSDP")  # which fully_shard puts before it
                found[f"{name}{numbers[name] or ''}"] = root
                numbers[name] += 1
            self._roots = {"": next(iter(found.values()))} if len(found) == 1 else found
        return self._roots

    def _number(self, root: torch.nn.Module) -> float:
        """Return when the script made a model, without its wrappers; copies have no number and come last."""
        return self._made.get(_unwrapped(root), math.inf)

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for prefix, root in self._models().items():
            for name, parameter in _unwrapped(root).named_parameters():
                if not parameter.is_meta:
                    yield f"{prefix}.{canonical_name(name)}".lstrip("."), parameter
        yield from self._loose.items()

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for models again if `optimizer` trains parameters that were not there before."""
        trained = _trained_by(optimizer)
        if self._names().keys() >= {id(parameter) for parameter in trained}:
            return
        self._roots, self._before_clipping = None, None
        names = self._names()
        loose = [parameter for parameter in trained if id(parameter) not in names]
        self._loose.update({f"parameter {len(self._loose) + n}": one for n, one in enumerate(loose)})

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._named()}

    def _is_flat(self) -> bool:
        """Return whether FSDP 1 holds parameters in flat pieces, whose gradients have no shape of their own."""
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        return any(isinstance(module, fsdp) for root in self._models().values() for module in root.modules())

    def _gradients_now(self) -> dict[str, Moments | None]:
        if self._is_flat():  # a rank's piece of a flat parameter
            return {}
        found = {name: parameter.grad for name, parameter in self._named()}
        moments = self._places.moments_of({name: one for name, one in found.items() if one is not None})
        return {name: moments.get(name) for name in found}

    def _weights_now(self) -> dict[str, Moments | None]:
        if self._is_flat():
            accelerator = self._accelerators[-1]
            held = [one for model in accelerator._models for one in accelerator.strategy.state.held_tensors(model)]
            return {**self._places.of_held(held)}
        return {**self._places.moments_of({name: parameter.detach() for name, parameter in self._named()})}

    # -- stop and resume -------------------------------------------------------------------------------

    def _resuming(self, iterate: Call, loader: object) -> Iterator[object]:
        if not self._is_resumed:
            self._is_resumed = True
            self._accelerators[-1].load_state(self._conditions.resumes_from)
        this_pass = object()
        self._passes.append(this_pass)
        try:
            for batch in iterate(loader):
                yield batch
                if self._evaluations.ends_pass(getattr(loader, "dataset", None)):
                    break
                if self._passes[0] is this_pass:
                    self._stop()
        finally:
            self._passes.remove(this_pass)

    def _stop(self) -> None:
        """Save the run and end it, if it has trained enough; a pass inside of another one couldn't be resumed."""
        if self._conditions.saves_at and self._record.num_steps >= self._conditions.saves_at:
            self._accelerators[-1].project_configuration.automatic_checkpoint_naming = False
            self._accelerators[-1].save_state(self._conditions.save_to)
            self.end()

    # -- the end ---------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the record if this process has trained."""
        record = self._record
        if not record.losses:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            record.rank, record.num_processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
            record.share = self._accelerators[-1].mesh.data_share().index if self._accelerators else record.rank
        if not self.has_finished:
            self._note_last_step()
        record.write(self._folder)

    def _note_last_step(self) -> None:
        """Note the weights, and the layers in training, as they are after the last step."""
        for optimizer in self._optimizers:
            for parameter in _trained_by(optimizer):
                weight = parameter.detach().double()
                self._record.weights.append((float(weight.sum()), float(weight.abs().sum())))
        self._record.normalizes = [
            type(found).__name__
            for found in gc.get_objects()
            if issubclass(type(found), _BATCH_NORMS) and found.training and not self._conditions.batch_parts
        ]

    def end(self) -> None:
        """Write the record and end the process without the end of the script, which writes files."""
        self.write()
        end_with_others(self._folder, "rank_*.json", self._record.num_processes, _OTHERS_SECONDS)


def _trained_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that this rank holds; those of other stages of a pipeline are on "meta"."""
    return [one for group in optimizer.param_groups for one in group["params"] if not one.is_meta]


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of wrappers."""
    for name in _WRAPPED:
        inner = module._modules.get(name)
        if inner is not None and len(module._modules) == 1:
            return _unwrapped(inner)
    return module
