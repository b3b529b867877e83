"""Import path kept for compatibility: DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from ..guests.deepspeed.engine import (
        DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper,
        GatheredParameters,
        map_pytorch_optim_to_deepspeed,
    )
    from ..guests.deepspeed.plugin import DummyOptim, DummyScheduler, HfDeepSpeedConfig, get_active_deepspeed_plugin

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "GatheredParameters",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate.guests.deepspeed",
    {
        "engine": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper GatheredParameters "
        "map_pytorch_optim_to_deepspeed",
        "plugin": "DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
    },
)
