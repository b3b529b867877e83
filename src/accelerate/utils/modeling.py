"""Import path kept for compatibility: models larger than one device."""

from __future__ import annotations

from ..big_models.budget import get_balanced_memory, get_max_memory
from ..big_models.device_map import check_device_map, clean_device_map, fallback_allocate, infer_auto_device_map, logger
from ..big_models.load import load_checkpoint_in_model, load_offloaded_weights, load_state_dict
from ..big_models.placement import set_module_tensor_to_device
from ..big_models.sizes import (
    _get_proper_dtype,
    calculate_maximum_sizes,
    check_device_same,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    retie_parameters,
)
from ..checkpointing import convert_file_size_to_int
from ..devices.memory import clear_device_cache
from ..hooks.align import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from ..parallel.rebind import is_peft_model
from ..precision.choose import get_grad_scaler
from ..state import get_mixed_precision_context_manager

__all__ = [
    "_get_proper_dtype",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "clear_device_cache",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "logger",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]
