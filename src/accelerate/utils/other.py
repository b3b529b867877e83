"""Import path kept for compatibility: models, files and miscellaneous functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..checkpointing import clean_state_dict_for_safetensors, load, save
from ..devices.memory import convert_bytes
from ..distributed.process_control import wait_for_everyone
from ..lazy import names_from
from ..modules import (
    get_model_tp_size,
    get_module_children_bottom_up,
    get_pretty_name,
    merge_dicts,
    model_has_dtensor,
    recursive_getattr,
)
from ..parallel.compile import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from ..parallel.rebind import extract_model_from_parallel
from ..ports import get_free_port, is_port_in_use
from ..versions import check_os_kernel

if TYPE_CHECKING:
    from ..guests.xla.launcher import install_xla


__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "install_xla",
    "is_compiled_module",
    "is_port_in_use",
    "is_repeated_blocks",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]

__getattr__: Callable[[str], Any] = names_from(__name__, "accelerate", {"guests.xla.launcher": "install_xla"})
