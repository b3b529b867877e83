"""Import path kept for compatibility: one training step on tensors without values."""

from __future__ import annotations

from ..guests.estimate.trace import Moment, Traceable, TrainingTrace, trace_training

__all__ = ["Moment", "Traceable", "TrainingTrace", "trace_training"]
