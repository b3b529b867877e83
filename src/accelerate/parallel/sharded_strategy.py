"""The base of strategies with DTensor parameters: steps, clipping across shards, full state dicts."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast, final
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FSDPModule

from ..checkpointing.quantized_state import refuse_half_weights
from ..checkpointing.run_state import StateDict
from ..checkpointing.sharded import StateAccess
from ..distributed.mismatched_calls import UNREACHED
from ..distributed.world import World
from ..modules import is_sharded
from ..torch_private.fsdp import (
    awaits_backward,
    reset_sharded_runtime,
    reshard,
    reshard_beside_gradients,
    shard_of_unsharded,
    sharded_parameters,
    snapshot_sharded_gradients,
    units_of,
)
from ..training.oom_retry import Retryable, RetryMode, snapshot_gradients
from ..training.open_window import GradientHolder
from .base import Clipping, Strategy, StrategyOptions
from .compile import uncompiled
from .gradient_norm import clip_sharded_grad_norm
from .gradients import ShardedGradients
from .matrix_optimizer import shard_state, step_on_whole_matrices
from .rebind import canonical_name, inner_optimizer
from .replicas import ReplicaGradients, backward_on_all, is_averaged, train_in_place
from .state import ModelState, Owner


class ShardedStrategy(Strategy, ABC):
    """A strategy in which some or all parameters are DTensors."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self._replicas: list[ReplicaGradients] = []  # replicated parameters beside shards
        self._units: WeakSet[FSDPModule] = WeakSet()  # the outermost ones of all models
        self._all_units: WeakSet[FSDPModule] = WeakSet()  # with those inside of them
        self._unreduced: set[int] = set()  # the models inside no_sync
        can_reset = getattr(FSDPModule, "reset_iter_state", None) is not None  # not in torch 2.6
        self.retry: Retryable | None = ShardedRetry(world, RetryMode.TOGETHER if can_reset else RetryMode.NEVER)

    def release(self) -> None:
        """Drop all references to the models."""
        super().release()
        self._replicas.clear()
        self._units.clear()
        self._all_units.clear()

    def _train_in_place(self, model: torch.nn.Module) -> None:
        """Make the replicas of ``model`` equal, and average the gradients that ``fully_shard`` doesn't reduce."""
        self._replicas += train_in_place(model, self.mesh, self._reduces(model))
        self._keep_units(model)

    def _keep_units(self, model: torch.nn.Module) -> None:
        """Keep the outermost units of ``model``, and reshard them where gradients and weights are read and written."""
        new = [unit for unit in outer_units(model) if unit not in self._units]
        for unit in cast("list[torch.nn.Module]", new):
            reshard_beside_gradients(unit)
        self._units.update(new)
        self._all_units.update(units_of(cast("list[torch.nn.Module]", new)))

    def _use_shards(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace unsharded parameters in ``optimizers``, which ``parameters()`` returns after some forwards."""
        shards = shard_of_unsharded(cast("Iterable[torch.nn.Module]", self._units))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"][:] = [shards.get(parameter, parameter) for parameter in group["params"]]

    def _reduces(self, model: torch.nn.Module) -> Callable[[], bool]:
        """Return a function that returns whether backward passes through ``model`` reduce gradients."""
        key = id(model)
        return lambda: key not in self._unreduced

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes accumulate unsharded gradients on each rank."""
        return _without_reduction(uncompiled(model), self._unreduced)

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float = 1, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss / num_steps``; the loss may miss replicated parameters on some ranks.

        Raises:
            CollectiveError: the loss reaches no shard on this rank, but does on others.
        """
        waiting = [unit for unit in self._units if awaits_backward(unit)]
        if not loss.requires_grad and any(map(_is_trained, waiting)):
            self._require_all()  # then torch raises on all ranks
        if scaler is not None and self._replicas and not loss.requires_grad:
            scaler.scale(loss)  # creates the scale, without which the scaler can't step
        backward = super().backward
        backward_on_all(
            self._replicas, lambda: backward(loss, scaler, num_steps, **kwargs), reaches_any=loss.requires_grad
        )
        is_reached = not all(map(awaits_backward, waiting)) or any(one.is_reached for one in self._replicas)
        if not is_reached and any(map(_is_trained, waiting)):
            self._require_all()

    def _require_all(self) -> None:
        """Raise on all ranks unless all ranks call this: no rank's loss reaches a shard."""
        if self.world.coordinator is not None:
            self.world.coordinator.require_all(UNREACHED)

    def _require_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise on all ranks if ``parameters`` have gradients on some ranks but not on this one."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(parameter.grad is not None for parameter in trained):
            return
        if self._units or any(is_sharded(parameter) or is_averaged(parameter) for parameter in trained):
            self._require_all()

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks that gather matrices for an optimizer of whole matrices.

        Raises:
            PreparationError: ``optimizer`` would keep low-bit state for sharded bf16 weights.
        """
        inner = inner_optimizer(optimizer)
        refuse_half_weights(inner)

        def before_step(stepped: torch.optim.Optimizer, *_: object) -> None:
            self._require_gradients(parameter for group in stepped.param_groups for parameter in group["params"])
            for unit in self._all_units:
                unit.reshard()  # otherwise the next forward uses weights that an earlier one has gathered

        inner.register_step_pre_hook(before_step)
        step_on_whole_matrices(optimizer, self.world.device)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; a collective."""
        self._require_gradients(parameters)
        return clip_sharded_grad_norm(parameters, *clipping, self.world.device)


class ShardedState(ModelState[Owner], ABC):
    """The state of models in which some or all parameters are DTensors."""

    @property
    def access(self) -> StateAccess:
        """The access for checkpoints to the state, including optimizers of whole matrices."""
        return _MatrixAccess(self.named_parameters, canonical_name)

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the trained parameters of ``model``; those that a forward has left unsharded are resharded."""
        reshard([model])
        return super().named_parameters(model)

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True if no parameter of ``model`` is sharded."""
        return model is not None and not any(map(is_sharded, model.parameters()))

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict on the main process, in CPU memory, and an empty one elsewhere; a collective."""
        strategy = self.strategy
        return self.access.full_model_state(strategy.unwrap(model, keep_torch_compile=False), strategy.world.is_main)

    @property
    def gradients(self) -> GradientHolder | None:
        """The gradients in ``.grad``, and the unsharded ones accumulated under ``no_sync``."""
        return ShardedGradients(self.layout, self.named_parameters, lambda model: [uncompiled(model)])


@final
class _MatrixAccess(StateAccess):
    """Access to the state of models with DTensors, and to that of optimizers of whole matrices."""

    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], keeps: bool
    ) -> StateDict:
        """Return the optimizer's state dict with full tensors; the owners of matrices shard their state first."""
        shard_state(optimizer)
        return super().full_optimizer_state(optimizer, models, keeps)


@final
class ShardedRetry(Retryable):
    """The retry of a batch on models under ``fully_shard``, whose runtime state can be reset."""

    def reset_forwards(self, model: torch.nn.Module) -> None:
        """Reset FSDP's runtime state: every unit is resharded and expects a forward."""
        for unit in outer_units(model):
            reset_sharded_runtime(unit)

    def snapshot_gradients(self, model: torch.nn.Module) -> Callable[[], None]:
        """Copy the gradients, with those accumulated under ``no_sync``; return a function that restores them."""
        if not outer_units(model):
            return super().snapshot_gradients(model)
        return snapshot_sharded_gradients(uncompiled(model), snapshot_gradients)


def _is_trained(unit: FSDPModule) -> bool:
    return any(parameter.requires_grad for parameter in sharded_parameters(cast("torch.nn.Module", unit)))


@contextmanager
def _without_reduction(model: torch.nn.Module, unreduced: set[int]) -> Iterator[None]:
    """Enter a context in which ``fully_shard`` doesn't reduce gradients; ``unreduced`` then has the model's id."""
    if id(model) in unreduced:  # the context around this one ends it
        yield
        return
    units = outer_units(model)
    for unit in units:
        unit.set_requires_gradient_sync(False)
    unreduced.add(id(model))
    try:
        yield
    finally:
        unreduced.discard(id(model))
        for unit in units:
            unit.set_requires_gradient_sync(True)


def outer_units(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the modules of ``model`` under ``fully_shard`` that are in no other such module."""
    inner = uncompiled(model)
    if isinstance(inner, FSDPModule):
        return [inner]
    return [unit for child in inner.children() for unit in outer_units(child)]
