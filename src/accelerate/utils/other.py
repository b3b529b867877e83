"""Old address: models, files and small things."""

from __future__ import annotations

from ..checkpointing.weights import clean_state_dict_for_safetensors
from ..memory import convert_bytes
from ..modules import get_module_children_bottom_up, get_pretty_name, merge_dicts, model_has_dtensor, recursive_getattr
from ..ports import get_free_port, is_port_in_use
from ..versions import check_os_kernel

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "convert_bytes",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "is_port_in_use",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
]
