"""How a model lies over the processes: one file per way, and the order in which they are asked.

A strategy's file is imported when it is chosen: what one way needs of torch is not paid for by the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ..lazy import names_from
from ..world import World

if TYPE_CHECKING:
    from .base import Strategy, StrategyOptions, is_placed_by_map

__all__ = ["ORDER", "Candidate", "Strategy", "StrategyOptions", "choose", "is_placed_by_map"]


@final
@dataclass(frozen=True)
class Candidate:
    """One strategy: where its class is, and for which settings and world it is the one that was asked for."""

    module: str  # absolute, or relative to this package (".ddp")
    name: str
    suits: Callable[[Any, World], bool]

    def load(self) -> type[Strategy]:
        """Import the class."""
        return getattr(importlib.import_module(self.module, __name__), self.name)


def _shards(version: int) -> Callable[[Any, World], bool]:
    """Whether FSDP ``version`` was asked for and there is a process group."""
    return lambda settings, world: (
        world.backend is not None and settings.fsdp is not None and settings.fsdp.fsdp_version == version
    )


def _cuts_layers(settings: Any, world: World) -> bool:
    """Whether layers are cut over all processes, so that no engine shards what is left."""
    return world.size > 1 and settings.parallelism is not None and settings.parallelism.tp_size == world.size


def _splits_layers(settings: Any, world: World) -> bool:
    """Whether the layers are split over several ranks in stages."""
    return world.size > 1 and settings.parallelism is not None and settings.parallelism.pp_size > 1


#: The first that suits wins.
ORDER: tuple[Candidate, ...] = (
    # Devices whose runtime starts and connects its processes itself.
    Candidate(".xla", "XlaDevices", lambda settings, world: bool(world.kind.runtime)),
    Candidate(".deepspeed", "DeepSpeed", lambda settings, world: settings.deepspeed is not None),
    Candidate(".megatron", "Megatron", lambda settings, world: settings.megatron is not None),
    Candidate(".pipeline", "Pipeline", _splits_layers),
    Candidate(".fsdp2", "FullyShard", _shards(2)),
    Candidate(".fsdp1", "FlatShard", _shards(1)),
    Candidate(".tensor", "TensorParallel", _cuts_layers),
    Candidate(".single", "SingleDevice", lambda settings, world: world.size == 1),
    Candidate(".ddp", "DataParallel", lambda settings, world: world.size > 1),
)


def choose(settings: Any, world: World, options: StrategyOptions) -> Strategy:
    """The strategy that ``settings`` ask for in ``world``."""
    for candidate in ORDER:
        if candidate.suits(settings, world):
            return candidate.load()(world, options)
    raise AssertionError(f"No strategy for a world of {world.size}: DataParallel takes every world of several.")


__getattr__ = names_from(__name__, __name__, {"base": "Strategy StrategyOptions is_placed_by_map"})
