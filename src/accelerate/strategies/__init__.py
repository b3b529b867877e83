"""How a model lies over the processes: one file per way, and the order in which they are asked."""

from __future__ import annotations

from typing import Any

from ..world import World
from .base import Strategy as Strategy
from .base import StrategyOptions as StrategyOptions
from .base import is_placed_by_map as is_placed_by_map
from .ddp import DataParallel
from .deepspeed import DeepSpeed
from .fsdp1 import FlatShard
from .fsdp2 import FullyShard
from .megatron import Megatron
from .pipeline import Pipeline
from .single import SingleDevice
from .tensor import TensorParallel
from .xla import XlaDevices

#: The first that suits wins.
ORDER: tuple[type[Strategy], ...] = (
    XlaDevices,
    DeepSpeed,
    Megatron,
    Pipeline,
    FullyShard,
    FlatShard,
    TensorParallel,
    SingleDevice,
    DataParallel,
)


def choose(settings: Any, world: World, options: StrategyOptions) -> Strategy:
    """The strategy that ``settings`` ask for in ``world``."""
    for strategy in ORDER:
        if strategy.suits(settings, world):
            return strategy(world, options)
    raise AssertionError(f"No strategy for a world of {world.size}: DataParallel takes every world of several.")
