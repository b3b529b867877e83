"""Weights that wait on disk or in host memory until their layer runs.

- `folder`: the documented folder of one file per weight and an index; `mapped`: safetensors files read in place.
- `weights`: both of them, and state dicts, as one mapping from name to tensor; `ahead`: read before they are needed.
"""

from __future__ import annotations

from .folder import load_offloaded_weight, offload_state_dict, offload_weight, save_offload_index
from .weights import OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict

__all__ = [
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]
