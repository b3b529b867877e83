"""Import path kept for compatibility: operations on nested tensors, and collectives over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..devices.table import is_torch_xpu_tensor
from ..distributed.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    chained_operation,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
    verify_operation,
)
from ..errors import DistributedOperationException
from ..lazy import names_from
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
from ..precision.base import ConvertOutputsToFp32, convert_outputs_to_fp32

if TYPE_CHECKING:
    from ..guests.deepspeed.engine import GatheredParameters


__all__ = [
    "GatheredParameters",
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__, "accelerate", {"guests.deepspeed.engine": "GatheredParameters"}
)
