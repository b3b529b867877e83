"""Old address: tensors in containers, and collectives over them."""

from __future__ import annotations

from ..errors import DistributedOperationException
from ..nested import (
    TensorInformation,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from ..precision.outputs import ConvertOutputsToFp32, convert_outputs_to_fp32

__all__ = [
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_input_tensors",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]
