"""Data parallelism: one process with one device, and replicas through torch's DistributedDataParallel.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any, ParamSpec, TypeVar, final
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ..data_loader import BatchSamplerShard, DataLoaderShard
from ..data_loader.sampling import unskipped
from ..distributed.world import World
from ..errors import PreparationError
from ..logging import MultiProcessAdapter, get_logger
from ..precision import Precision
from ..settings.env import flag
from ..torch_private.distributed import find_tensors, gradient_order, has_stateful_comm_hook, synchronize_buffers
from ..torch_private.modules import gradient_hooks
from ..training.oom_retry import Retryable, RetryMode
from .base import PreparedArguments, Role, Strategy, StrategyOptions, refuse_device_map
from .compile import uncompiled
from .context_parallel import prepare_attention

logger: MultiProcessAdapter = get_logger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@final
class SingleDevice(Strategy):
    """One process with the model on one device, without a wrapper."""

    hands_over_shards = True
    can_repeat_passes = True


# --------------------------------------------------------------------------------------------------
# Replicas


@final
class Replica(DistributedDataParallel):
    """A DistributedDataParallel module that delegates all other methods to the model.

    ``model.generate(...)`` or ``model.encode(...)`` work as on the model. A method raises if it computes gradients
    through the model's layers and bypasses ``forward``, because DDP would silently not reduce them.
    """

    #: Tensors in the graphs of forwards under ``no_sync`` whose backward hasn't run yet; only with
    #: ``find_unused_parameters``.
    awaiting_backward: dict[object, list[torch.Tensor]]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_modules" not in self.__dict__ or "module" not in self._modules:
                raise
        value = getattr(self.module, name)
        return _guarded(value, name, self.module) if callable(value) else value


def _guarded(method: Callable[Arguments, Result], name: str, model: torch.nn.Module) -> Callable[Arguments, Result]:
    if isinstance(method, torch.nn.Module) or getattr(method, "__self__", None) is None:
        return method  # a submodule or a function: it can't bypass forward()

    @wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        thread, own, owner = get_ident(), set(_unwrapped_modules(model)), type(model).__name__

        def refuse(module: torch.nn.Module, _: object) -> None:  # called for all modules of the process
            if module not in own or get_ident() != thread or not (torch.is_grad_enabled() and module.training):
                return
            if any(p.requires_grad for p in module.parameters(False)):
                raise PreparationError(
                    f"{owner}.{name}() computes gradients through {type(module).__name__} without passing through "
                    f"{owner}.forward(), so they would not be averaged over the processes. Compute the loss from "
                    f"`model(...)`, or, if no gradient is wanted, call it under `torch.no_grad()` or after "
                    "`model.eval()`, or on `accelerator.unwrap_model(model)`."
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            return method(*args, **kwargs)
        finally:
            handle.remove()

    return call


def _unwrapped_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Iterate over ``model`` and the modules in it, except those inside another DDP module."""
    yield model
    for child in model.children():
        if not isinstance(child, DistributedDataParallel):
            yield from _unwrapped_modules(child)


@final
class DataParallel(Strategy):
    """Replicas of the whole model, one per process; their gradients are averaged in the backward pass."""

    hands_over_shards = True
    can_repeat_passes = True

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        # Where ranks share a sequence, attention runs collectives inside the forward.
        self.retry = _ReplicaRetry(world, RetryMode.TOGETHER if self.mesh.active("cp", "sp") else RetryMode.ALONE)

    def check(self, arguments: PreparedArguments) -> None:
        """Raise if a model can't be replicated."""
        super().check(arguments)
        for argument in arguments.of(Role.MODEL):
            _check_replicable(argument.current)

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` cast, on its device, wrapped (unless ``evaluation_mode``) and compiled.

        Raises:
            PreparationError: it can't be replicated.
        """
        _check_replicable(model)
        return super().place_model(model, precision, device_placement, evaluation_mode)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap ``model`` in a :class:`Replica`; return a model without trainable parameters unchanged."""
        own, given = self.unwrap(model, keep_torch_compile=False), replica_in(model)
        if given is not None:
            if given.will_sync_module_buffers():
                self.broadcasting[own] = ref(given)
            return model
        if not any(p.requires_grad for p in model.parameters()):
            return model
        if self.shards_attention:
            prepare_attention(model, self.mesh)
        handler = self.options.ddp_handler
        kwargs: dict[str, Any] = handler.to_kwargs() if handler else {}
        for name in ("comm_hook", "comm_wrapper", "comm_state_option"):
            kwargs.pop(name, None)
        device = self.world.device
        on_one_device = device.type != "cpu" and {p.device for p in model.parameters()} == {device}
        replica = Replica(model, device_ids=[device.index] if on_one_device else None, **kwargs)
        if handler is not None:
            handler.register_comm_hook(replica)
        if replica.will_sync_module_buffers():
            self.broadcasting[own] = ref(replica)
        replica.awaiting_backward = {}
        if replica.find_unused_parameters and not replica.static_graph:
            replica.register_forward_hook(_remember_outputs)
        return replica

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes don't reduce gradients."""
        return _without_reduction(model)


def _check_replicable(model: torch.nn.Module) -> None:
    if not flag("ACCELERATE_BYPASS_DEVICE_MAP"):
        refuse_device_map(model)


@final
class _ReplicaRetry(Retryable):
    """The retry of a batch on replicas; gradients are averaged once the whole batch fits."""

    def local_gradients(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Enter a context in which gradients stay on this rank until :meth:`all_reduce_gradients`."""
        return _without_reduction(model)

    def check_parts(self, model: torch.nn.Module) -> None:
        """Raise if DDP has ``static_graph=True``, because a batch may be split into micro-batches."""
        if getattr(replica_in(model), "static_graph", False):
            raise PreparationError(
                "DistributedDataParallelKwargs(static_graph=True) and backward_in_parts(): a batch may be computed in "
                "several parts, so the graph isn't static. Leave static_graph out."
            )

    def sync_buffers(self, model: torch.nn.Module) -> None:
        """Broadcast the main process's buffers, once per update, before its first forward."""
        replica = replica_in(model)
        if replica is not None and replica.will_sync_module_buffers():
            synchronize_buffers(replica)
            replica.require_forward_param_sync = False

    def all_reduce_gradients(self, model: torch.nn.Module) -> None:
        """Average the gradients in a backward pass that adds zero to them."""
        replica = replica_in(model)
        if replica is None:
            return
        self.reset_forwards(model)
        looks_for_unused = replica.find_unused_parameters
        used = [p for p in _reduced_parameters(replica) if p.grad is not None or not looks_for_unused]
        _reduce_zeros(replica, used)
        replica.require_forward_param_sync = True

    def reset_forwards(self, model: torch.nn.Module) -> None:
        """Forget the outputs of forwards whose backward will never run."""
        getattr(replica_in(model), "awaiting_backward", {}).clear()


def replica_in(model: object) -> DistributedDataParallel | None:
    """Return ``model`` itself or the module compiled in it, whichever is DDP; None if neither."""
    if isinstance(model, DistributedDataParallel):  # first: a Replica answers for the attributes of its module
        return model
    inner = uncompiled(model) if isinstance(model, torch.nn.Module) else model
    return inner if isinstance(inner, DistributedDataParallel) else None


def _without_reduction(model: torch.nn.Module) -> AbstractContextManager[None]:
    replica = replica_in(model)
    return nullcontext() if replica is None else replica.no_sync()


def _reduced_parameters(replica: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, in DDP's order."""
    ignored = getattr(replica, "parameters_to_ignore", ())
    named = replica.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def _reduce_zeros(replica: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Run a backward that adds zero to the gradients of ``parameters``, last one first, and averages them."""
    nothing = torch.stack([parameter.sum().to(torch.float32) * 0 for parameter in parameters]).sum()
    replica.reducer.prepare_for_backward([nothing] if replica.find_unused_parameters else [])  # pyright: ignore[reportAttributeAccessIssue]
    nothing.backward()


# --------------------------------------------------------------------------------------------------
# The order of reduction
#
# After the first backward of a run, torch rebuilds the buckets in the order in which gradients became ready. With three
# ranks or more, the order of a sum depends on the position in the bucket, so a run that resumes bit for bit needs the
# buckets of the earlier run from its first step on.


def reduction_orders(models: Iterable[torch.nn.Module]) -> list[list[int] | None] | None:
    """Return each model's order of parameters in DDP's buckets; None for a fixed order."""
    replicas = map(replica_in, models)
    orders = [gradient_order(replica) if replica and _rebuilds_buckets(replica) else None for replica in replicas]
    return orders if any(orders) else None


def restore_reduction_orders(models: Iterable[torch.nn.Module], orders: Sequence[list[int] | None]) -> None:
    """Make each model fill its buckets in the order of :func:`reduction_orders`; a collective.

    Average zero gradients in that order, before the first backward, and restore the gradients afterwards.
    """
    for replica, order in zip(map(replica_in, models), orders, strict=False):
        if order is None or replica is None or not _rebuilds_buckets(replica) or gradient_order(replica) is not None:
            continue
        parameters = _reduced_parameters(replica)
        if sorted(order) != list(range(len(parameters))):
            continue  # other parameters are trained than in the run that was saved
        gradients = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                _reduce_zeros(replica, [parameters[number] for number in reversed(order)])
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def _rebuilds_buckets(replica: DistributedDataParallel) -> bool:
    """Return whether DDP reorders its buckets after the first backward, and a backward of zeros can set the order.

    False where hooks would see the zeros as gradients, where DDP records the first backward as the static graph, and
    where the sum doesn't depend on the order because there are only two ranks.
    """
    if replica.find_unused_parameters or replica.static_graph or has_stateful_comm_hook(replica):
        return False
    if replica.__dict__.get("reducer") is None:  # the program has destroyed the process group
        return False
    if torch.distributed.get_world_size(replica.process_group) <= 2:
        return False
    return not any(gradient_hooks(parameter) for parameter in _reduced_parameters(replica)) and not any(
        getattr(module, "sparse", False) for module in replica.modules()
    )


def _remember_outputs(replica: Replica, _: object, output: object) -> None:
    """Record the outputs, so that ``trigger_sync_in_backward`` can find the parameters in their graphs."""
    if not torch.is_grad_enabled():
        return
    awaiting = replica.awaiting_backward
    if replica.require_backward_grad_sync:
        awaiting.clear()
        return
    forward, outputs = object(), [tensor for tensor in find_tensors(output) if tensor.requires_grad]
    # An empty slice refers to the graph, but keeps no activations alive.
    awaiting[forward] = [tensor.narrow(0, 0, 0).sum() if tensor.ndim else tensor for tensor in outputs]

    def forget(_: torch.Tensor) -> None:
        awaiting.pop(forward, None)

    for tensor in outputs:
        tensor.register_hook(forget)


@contextmanager
def trigger_sync_in_backward(model: torch.nn.Module) -> Generator[None]:
    """Enter a context in which backward reduces the gradients of forwards under ``no_sync``.

    With ``find_unused_parameters``, it has to be the only backward pass that is still to run.

    Args:
        model: a DDP module, or a module that contains some, such as a ModuleList, a wrapper or a compiled module.
    """
    replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    reduced_before = [replica.require_backward_grad_sync for replica in replicas]
    for replica in replicas:
        replica.require_backward_grad_sync = True
        replica.require_forward_param_sync = True
        # DDP.forward does the same outside of no_sync.
        outputs = [tensor for tensors in getattr(replica, "awaiting_backward", {}).values() for tensor in tensors]
        replica.reducer.prepare_for_backward(outputs)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for replica, was_reduced in zip(replicas, reduced_before, strict=True):
            replica.require_backward_grad_sync = was_reduced


# --------------------------------------------------------------------------------------------------
# Uneven inputs: torch's Join around replicas that run out of batches at different times


@contextmanager
def join_uneven_inputs(
    world: World, joinables: Sequence[object], loaders: Sequence[object], *, configured: bool, override: bool | None
) -> Iterator[None]:
    """Enter a context in which a rank without further batches joins the other ranks' collectives.

    Args:
        joinables: prepared models (and other ``Joinable`` objects).
        loaders: the prepared loaders; inside the block, their ``even_batches`` is ``override``.
        configured: the Accelerator's ``even_batches``.
        override: ``even_batches`` for this block; None keeps it. With even batches, all ranks end together.
    """
    if world.size == 1:
        yield
        return
    from torch.distributed.algorithms.join import Join, Joinable

    even = configured if override is None else override
    inner = [replica_in(joinable) or joinable for joinable in joinables]
    can_join = [joinable for joinable in inner if isinstance(joinable, Joinable)]
    if len(can_join) < len(inner):
        logger.warning(
            "join_uneven_inputs(): only models replicated by DistributedDataParallel can be joined; "
            "the others take part as they are."
        )
    restore = [] if override is None else _override_even_batches(loaders, override)
    try:
        if even or not can_join:
            yield
        else:
            with Join(can_join, enable=True, throw_on_early_termination=False):
                yield
    finally:
        for sampler, value in restore:
            sampler.even_batches = value


def _override_even_batches(loaders: Sequence[object], value: bool) -> list[tuple[BatchSamplerShard, bool]]:
    changed: list[tuple[BatchSamplerShard, bool]] = []
    for loader in loaders:
        batches = loader.batch_sampler if isinstance(loader, DataLoaderShard) else None
        sampler = None if batches is None else unskipped(batches)[0]
        if not isinstance(sampler, BatchSamplerShard):
            logger.warning_once(
                "join_uneven_inputs(even_batches=...) leaves iterable and dispatched loaders as they are."
            )
            continue
        changed.append((sampler, sampler.even_batches))
        sampler.even_batches = value
    return changed
