"""Old address: DeepSpeed."""

from __future__ import annotations

from ..plugins.deepspeed import DummyOptim, DummyScheduler, HfDeepSpeedConfig, get_active_deepspeed_plugin

__all__ = ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin"]
