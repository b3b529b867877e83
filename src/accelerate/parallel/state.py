"""The state of a strategy's models for checkpoints: names, full weights, ways to load, gradients between updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, final

import torch

from ..checkpointing.items import CheckpointItem
from ..checkpointing.run_state import StateDict, Stateful, StrategyState
from ..checkpointing.sharded import InPlace, StateAccess, optimizer_folder, own_shards, weights_folder
from ..checkpointing.shards_item import ShardsItem
from ..checkpointing.store import StagingDirectory
from ..lazy import function_in_use
from ..training.open_window import REPLICAS, GradientHolder
from .gradients import PlainGradients
from .held_tensors import HeldTensor, held_tensors
from .rebind import canonical_name, inner_optimizer, parameters_by_name

if TYPE_CHECKING:
    from .base import Strategy

Owner = TypeVar("Owner", bound="Strategy", covariant=True)


class ModelState(ABC, Generic[Owner]):
    """The state of the models and optimizers of one strategy."""

    #: Whether a checkpoint has shards, not gathered state, if there is no FSDP plugin that says so.
    prefers_shards: ClassVar[bool] = False

    def __init__(self, strategy: Owner) -> None:
        self.strategy = strategy

    def named_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the trained parameters of ``model``, prepared or not, by the user's own names."""
        return parameters_by_name(self.strategy.unwrap(model, keep_torch_compile=False))

    def saved_model(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own model or ``prepared``, whichever is saved, passed to hooks and asked for gradients."""
        return self.strategy.unwrap(model, keep_torch_compile=False)

    @abstractmethod
    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True if this process holds all weights of ``model``; of all models and optimizers if it is None.

        The main process can then save them without the other ranks.
        """

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict of ``model``, under the names of the user's own module."""
        inner = self.strategy.unwrap(model, keep_torch_compile=False) if unwrap else model
        if has_offloaded_weights(inner):
            return function_in_use("get_state_dict_offloaded_model")(inner)
        return inner.state_dict()

    def collective_full_state_dict(
        self, model: torch.nn.Module, operation: str, unwrap: bool = True
    ) -> dict[str, object]:
        """Return :meth:`full_state_dict` once all the ranks that it needs have called ``operation``.

        Raises:
            CollectiveError: on every rank, if all are needed and one doesn't call the public method ``operation``.
        """
        coordinator = self.strategy.world.coordinator
        if coordinator is not None and not self.is_whole(model):
            coordinator.require_all(operation)
        return self.full_state_dict(model, unwrap)

    def held_tensors(self, model: torch.nn.Module) -> list[HeldTensor]:
        """Return the tensors of the state dict of ``model``, each with this rank's part; no collective."""
        inner = self.strategy.unwrap(model, keep_torch_compile=False)
        if has_offloaded_weights(inner):
            return held_tensors(function_in_use("get_state_dict_offloaded_model")(inner))
        return held_tensors(InPlace(self.named_parameters, canonical_name).model_shards(inner))

    @property
    def access(self) -> StateAccess:
        """The access for checkpoints to the state of prepared models and their optimizers."""
        return InPlace(self.named_parameters, canonical_name, broadcasting=self.strategy.broadcasting)

    def checkpoint_state(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Stateful], *, model_only: bool = False
    ) -> StrategyState:
        """Return the state of ``models`` and ``optimizers`` for a checkpoint; a collective.

        Where this process doesn't hold all of it, it is gathered or in shards, as the FSDP plugin says. Gathered state
        has the same files as a single process's; shards have folders of their own.
        """
        if self.is_whole():
            return StrategyState([self.full_state_dict(model) for model in models], optimizers)
        from torch.distributed.fsdp import StateDictType

        strategy, access, plugin = self.strategy, self.access, self.strategy.options.plugins.fsdp
        inner = [] if model_only else list(map(inner_optimizer, optimizers))
        shards = self.prefers_shards if plugin is None else plugin.state_dict_type is not StateDictType.FULL_STATE_DICT
        if shards:
            return StrategyState(write=_shards_of(access, models, inner, not strategy.averages_replicas))
        keeps = strategy.world.is_local_main  # the writer of each node, where every node writes
        return StrategyState(
            [access.full_model_state(model, keeps) for model in models],
            [_GatheredOptimizer(access.full_optimizer_state(one, models, keeps)) for one in inner],
        )

    def restorable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Return the ``optimizers`` whose state a checkpoint restores."""
        return optimizers

    @property
    def gradients(self) -> GradientHolder | None:
        """The access for saving gradients between two updates; None if an engine keeps them."""
        return None

    @property
    def layout(self) -> str:
        """The placement of gradients over the ranks, independent of the models."""
        return REPLICAS if self.is_whole() else f"{type(self.strategy).__name__}, {self.strategy.mesh.equation()}"


@final
class ReplicatedState(ModelState["Strategy"]):
    """The state of models that every process holds in full."""

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True."""
        return True

    @property
    def gradients(self) -> GradientHolder | None:
        """The gradients in ``.grad``."""
        return PlainGradients(self.layout, self.named_parameters)


@final
class _GatheredOptimizer:
    """An optimizer's full state dict, gathered while all ranks took part."""

    def __init__(self, state: dict[str, object]) -> None:
        self._state = state

    def state_dict(self) -> StateDict:
        """Return the state dict of an optimizer of full tensors."""
        return self._state


def _shards_of(
    access: StateAccess,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    replicas_differ: bool,
) -> Callable[[StagingDirectory], list[CheckpointItem]]:
    """Return a function that takes a staging directory and returns the checkpoint items of this rank's shards."""

    def parts(staging: StagingDirectory) -> list[CheckpointItem]:
        item = partial(ShardsItem, ranks=staging.ranks, staging=staging, replicas_differ=replicas_differ)
        return [
            *(
                item(weights_folder(staging.folder, index), {"model": own_shards(access.model_shards(model))})
                for index, model in enumerate(models)
            ),
            *(
                item(optimizer_folder(staging.folder, index), {"optimizer": access.optimizer_shards(one, models)})
                for index, one in enumerate(optimizers)
            ),
        ]

    return parts


def has_offloaded_weights(model: torch.nn.Module) -> bool:
    """Return True if hooks of ``model`` load some of its weights only for a forward."""
    from ..hooks.align import has_offloaded_params

    return any(has_offloaded_params(module) for module in model.modules())
