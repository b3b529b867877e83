"""Optimizer states and activations that are kept in host memory while a model trains."""

from __future__ import annotations

from .big_models.training_offload import offload_activations, offload_optimizer

__all__ = ["offload_activations", "offload_optimizer"]
