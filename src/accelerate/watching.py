"""Import path kept for compatibility: the numbers, rules and callbacks of a run."""

from __future__ import annotations

from .guests.monitor.run_monitor import LossRules, RunCallback, RunWatch
from .guests.monitor.throughput import Flops, StepReport, count_flops

__all__ = ["Flops", "LossRules", "RunCallback", "RunWatch", "StepReport", "count_flops"]
