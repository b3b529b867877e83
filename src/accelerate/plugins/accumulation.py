"""How many micro-batches make one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings.ddp import AccumulationOptions
from .base import KwargsHandler, settle


@dataclass
class GradientAccumulationPlugin(AccumulationOptions, KwargsHandler):
    """The number of micro-batches per step, and what that means for schedulers and loader ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, "num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
