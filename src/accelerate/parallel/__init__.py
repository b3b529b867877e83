"""Parallelism strategies: how a model is distributed over the processes, one file or folder per kind, and their order.

A strategy's file is imported when it is chosen, so that no strategy pays for the imports of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import seams
from ..distributed.world import World
from ..errors import NotBuilt
from ..lazy import names_from
from ..seams import Candidate

if TYPE_CHECKING:
    import torch

    from ..settings.tree import Settings
    from .base import Strategy, StrategyOptions, is_placed_by_map
    from .ddp import reduction_orders, restore_reduction_orders
    from .streaming import stream_weights

__all__ = [
    "ORDER", "Candidate", "Strategy", "StrategyOptions", "adopt", "choose",
    "is_placed_by_map", "reduction_orders", "restore_reduction_orders", "stream_weights",
]  # fmt: skip


def _shards(version: int) -> Callable[[Settings, World], bool]:
    """Return a predicate that is true if FSDP ``version`` was asked for and there is a process group."""
    return lambda settings, world: (
        world.backend is not None and settings.fsdp is not None and settings.fsdp.fsdp_version == version
    )


def _cuts_layers(settings: Settings, world: World) -> bool:
    """Return True if tensor parallelism uses all processes; then no other engine shards the parameters."""
    return world.size > 1 and settings.parallelism is not None and settings.parallelism.tp_size == world.size


def _splits_layers(settings: Settings, world: World) -> bool:
    """Return True if the layers are split over several ranks in pipeline stages."""
    return world.size > 1 and settings.parallelism is not None and settings.parallelism.pp_size > 1


def _replicates(settings: Settings, world: World) -> bool:
    """Return True unless the settings shard parameters over the processes."""
    config = settings.parallelism
    is_whole = config is None or config.dp_shard_size == config.tp_size == 1
    return world.size > 1 and not world.kind.runtime and is_whole


#: The core's own candidates; the first that suits is chosen.
ORDER: tuple[Candidate, ...] = (
    Candidate(f"{__name__}.pipeline.strategy", "Pipeline", _splits_layers),
    Candidate(f"{__name__}.fsdp.fsdp2", "FullyShard", _shards(2)),
    Candidate(f"{__name__}.fsdp.fsdp1", "FlatShard", _shards(1)),
    Candidate(f"{__name__}.tensor_parallel", "TensorParallel", _cuts_layers),
    Candidate(f"{__name__}.ddp", "SingleDevice", lambda settings, world: world.size == 1 and not world.kind.runtime),
    Candidate(f"{__name__}.ddp", "DataParallel", _replicates),
)


def choose(settings: Settings, world: World, options: StrategyOptions) -> Strategy:
    """Return the strategy that ``settings`` ask for in ``world``.

    Guests are asked before the rows of `ORDER`, but the one for models that come sharded is asked last.

    Raises:
        NotBuilt: the guest that trains on such devices is missing.
    """
    for candidate in sorted((*seams.strategies(), *ORDER), key=lambda candidate: candidate.takes_shards):
        if candidate.suits(settings, world):
            return candidate.load()(world, options)
    raise NotBuilt(
        f"This installation has no strategy for {world.size} processes on {world.kind.name} devices: the part of "
        "accelerate that trains on them is missing. Install accelerate again."
    )


def adopt(strategy: Strategy, model: torch.nn.Module, *, is_in_use: bool) -> Strategy:
    """Return the strategy that also trains ``model``; a sharded model keeps its layout and the mesh of its DTensors.

    Args:
        is_in_use: prepared loaders or schedulers depend on the current data-parallel rank and size.

    Raises:
        PreparationError: its mesh differs from that of the models before it, or from the ParallelismConfig.
        NotBuilt: the guest that trains such models is missing.
    """
    from ..modules import is_sharded

    if not any(map(is_sharded, model.parameters())):
        return strategy
    known = strategy.mesh
    before = strategy.before_adoption or (strategy, known, strategy.mesh_source)
    if strategy.hands_over_shards:
        candidate = next((candidate for candidate in seams.strategies() if candidate.takes_shards), None)
        if candidate is None:
            raise NotBuilt(
                f"{type(model).__name__} came sharded: the part of accelerate that trains such models is missing. "
                "Install accelerate again, or shard the model by Accelerator(fsdp_plugin=...)."
            )
        strategy = candidate.load()(strategy.world, strategy.options)
    elif not strategy.adopts(model):
        return strategy
    from .layout import agreed_mesh

    strategy.mesh = agreed_mesh(model, known, strategy.mesh_source, is_in_use=is_in_use)
    strategy.mesh_source = f"{type(model).__name__}, which came first,"
    strategy.before_adoption = before
    return strategy


def unadopted(strategy: Strategy) -> Strategy:
    """Return the strategy, and restore its mesh, from before it adopted a sharded model."""
    if strategy.before_adoption is None:
        return strategy
    before, mesh, source = strategy.before_adoption
    before.mesh, before.mesh_source, before.before_adoption = mesh, source, None
    return before


__getattr__: Callable[[str], Any] = names_from(
    __name__,
    __name__,
    {
        "base": "Strategy StrategyOptions is_placed_by_map",
        "ddp": "reduction_orders restore_reduction_orders",
        "streaming": "stream_weights",
    },
)
