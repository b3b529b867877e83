"""Estimates of a model's memory in training, and of the parallel layouts that fit."""

from __future__ import annotations

from .guests.estimate.plan import Footprint, Layout, footprint
from .guests.estimate.subject import find_subject
from .guests.estimate.trace import TrainingTrace, trace_training

__all__ = ["Footprint", "Layout", "TrainingTrace", "find_subject", "footprint", "trace_training"]
