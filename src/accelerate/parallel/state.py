"""The state of a strategy's models: names, full weights, this rank's part of each tensor, gradients between updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast, final

import torch

from ..checkpointing.dcp import ShardsItem
from ..checkpointing.items import CheckpointItem
from ..checkpointing.run_state import StateDict, Stateful, StrategyState
from ..checkpointing.sharded import InPlace, StateAccess, optimizer_folder, own_shards, weights_folder
from ..checkpointing.store import StagingDirectory
from ..errors import NotBuilt
from ..lazy import function_in_use
from ..modules import is_sharded
from ..torch_private.distributed import shard_offset
from ..training.open_window import REPLICAS, GradientHolder
from .gradients import PlainGradients
from .rebind import canonical_name, inner_optimizer, parameters_by_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from .base import Strategy

#: (begin, end) in each dimension of a tensor; empty where begin is end.
Region: TypeAlias = tuple[tuple[int, int], ...]
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
        return _ReplicaAccess(self)

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
class _ReplicaAccess(StateAccess):
    """Access to the state of models whose buffers DDP may broadcast from the main process."""

    def __init__(self, state: ModelState[Strategy]) -> None:
        super().__init__(state.named_parameters, canonical_name)
        self._broadcasting = state.strategy.broadcasting

    def broadcasts_buffers(self, model: torch.nn.Module) -> bool:
        """Return whether DDP broadcasts them: not after a forward under ``no_sync`` or ``no_grad``."""
        replica = self._replica_of(model)
        return replica is not None and replica.will_sync_module_buffers()

    def keep_buffers(self, model: torch.nn.Module) -> None:
        """Make DDP skip the broadcast before the next forward."""
        replica = self._replica_of(model)
        if replica is not None:
            replica.require_forward_param_sync = False

    def _replica_of(self, model: torch.nn.Module) -> DistributedDataParallel | None:
        return self._broadcasting[model]() if model in self._broadcasting else None


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


# --------------------------------------------------------------------------------------------------
# The tensors of a model's state dict, each with the region that this rank holds


@final
@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor distributed over the ranks, and this rank's part of it.

    Attributes:
        names: the names in the user's own model; tied parameters have several.
        local: the values of ``region``, without gradient; None if this rank holds nothing.
        region: this rank's part; with ``strides``, a part of the tensor flattened in memory order.
        strides: the strides of the whole tensor, if a flat parameter holds it in memory order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor | None
    region: Region | None
    strides: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Region:
        """The region that covers the whole tensor."""
        return tuple((0, size) for size in (self.shape if self.strides is None else (self.num_elements,)))

    def empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for the whole."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)

    def part_of(self, whole: torch.Tensor, region: Region) -> torch.Tensor:
        """Return a view of ``region`` of ``whole``."""
        if self.strides is not None:
            whole = whole.as_strided((self.num_elements,), (1,))
        return part_of(whole, region)


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a view of ``region`` of ``whole``."""
    return whole[tuple(slice(begin, end) for begin, end in region)]


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of ``region``."""
    return tuple(end - begin for begin, end in region)


def size_of(region: Region) -> int:
    """Return the number of elements of ``region``."""
    return math.prod(shape_of(region))


def region_of(tensor: DTensor) -> Region | None:
    """Return the region of this rank's shard of ``tensor``; None if the shard isn't a single region."""
    shape, offset = shard_offset(tensor)
    if tuple(tensor.to_local().shape) != shape:
        return None
    return tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def buckets(sizes: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Iterate over the indices of ``sizes`` in runs whose sum is at most ``limit``; a larger size is a run alone."""
    held, run = 0, list[int]()
    for position, size in enumerate(sizes):
        if run and held + size > limit:
            yield run
            held, run = 0, []
        run.append(position)
        held += size
    if run:
        yield run


def held_tensors(state: Mapping[str, object]) -> list[HeldTensor]:
    """Return the tensors of a state dict with live tensors; other ranks hold those on the meta device."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return [_held(tuple(names[key]), tensor.detach()) for key, tensor in tensors.items()]


def _held(names: tuple[str, ...], tensor: torch.Tensor) -> HeldTensor:
    shape = tuple(tensor.shape)
    if tensor.is_meta:
        return HeldTensor(names, shape, tensor.dtype, None, None)
    if not is_sharded(tensor):
        return HeldTensor(names, shape, tensor.dtype, tensor, tuple((0, size) for size in shape))
    sharded = cast("DTensor", tensor)
    if sharded.device_mesh.get_coordinate() is None:
        return HeldTensor(names, shape, tensor.dtype, None, None)
    local: Any = sharded.to_local()
    if callable(getattr(local, "wait", None)):  # the result of a pending collective
        local = local.wait()
    region = region_of(sharded)
    if region is None:
        raise NotBuilt(
            f"{names[0]!r} of shape {list(shape)} is sharded as {sharded.placements}, and this rank's shard of "
            f"shape {list(local.shape)} is no single region: it can't be streamed. Use get_state_dict()."
        )
    return HeldTensor(names, shape, tensor.dtype, local, region if size_of(region) else None)
