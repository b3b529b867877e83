"""Import path kept for compatibility: the prepared optimizer."""

from __future__ import annotations

from .training.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step

__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"]
