"""Estimates of the memory that a model needs for training, and of the parallel layouts that fit."""

from __future__ import annotations

from .guests.estimate.plan import Candidate, Footprint, Layout, Plan, footprint, layouts, propose
from .guests.estimate.subject import find_subject, inputs_of_transformers
from .guests.estimate.trace import Moment, Traceable, TrainingTrace, trace_training

__all__ = [
    "Candidate",
    "Footprint",
    "Layout",
    "Moment",
    "Plan",
    "Traceable",
    "TrainingTrace",
    "find_subject",
    "footprint",
    "inputs_of_transformers",
    "layouts",
    "propose",
    "trace_training",
]
