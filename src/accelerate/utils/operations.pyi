"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..devices.table import is_torch_xpu_tensor as is_torch_xpu_tensor
from ..distributed.collectives import broadcast as broadcast, broadcast_object_list as broadcast_object_list
from ..distributed.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from ..distributed.collectives import chained_operation as chained_operation
from ..distributed.collectives import copy_tensor_to_devices as copy_tensor_to_devices, gather as gather
from ..distributed.collectives import gather_object as gather_object, gather_tensor_shape as gather_tensor_shape
from ..distributed.collectives import pad_across_processes as pad_across_processes, reduce as reduce
from ..distributed.collectives import verify_operation as verify_operation
from ..errors import DistributedOperationException as DistributedOperationException
from ..guests.deepspeed.engine import GatheredParameters as GatheredParameters
from ..nested import concatenate as concatenate, convert_to_fp32 as convert_to_fp32, find_batch_size as find_batch_size
from ..nested import find_device as find_device, get_data_structure as get_data_structure, get_shape as get_shape
from ..nested import honor_type as honor_type, ignorant_find_batch_size as ignorant_find_batch_size
from ..nested import initialize_tensors as initialize_tensors, is_namedtuple as is_namedtuple
from ..nested import is_tensor_information as is_tensor_information, is_torch_tensor as is_torch_tensor
from ..nested import listify as listify, pad_input_tensors as pad_input_tensors, recursively_apply as recursively_apply
from ..nested import send_to_device as send_to_device, slice_tensors as slice_tensors
from ..nested import TensorInformation as TensorInformation
from ..precision.base import convert_outputs_to_fp32 as convert_outputs_to_fp32
from ..precision.base import ConvertOutputsToFp32 as ConvertOutputsToFp32
