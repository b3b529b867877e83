"""Import path kept for compatibility: weights and states offloaded to host memory or disk."""

from __future__ import annotations

from .big_models.offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from .big_models.training_offload import offload_activations, offload_optimizer

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_activations",
    "offload_optimizer",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]
