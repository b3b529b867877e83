"""Weights that wait on disk or in host memory until their layer runs.

- `folder`: the documented folder of one file per weight and an index; `mapped`: safetensors files read in place.
- `weights`: both of them, and state dicts, as one mapping from name to tensor; `ahead`: read before they are needed.
- `training`: optimizer state and activations that wait in host memory.
"""

from __future__ import annotations

from .folder import load_offloaded_weight, offload_state_dict, offload_weight, save_offload_index
from .training import offload_activations, offload_optimizer
from .weights import OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict

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
