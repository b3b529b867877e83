"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..big_models.budget import get_balanced_memory as get_balanced_memory, get_max_memory as get_max_memory
from ..big_models.device_map import check_device_map as check_device_map, clean_device_map as clean_device_map
from ..big_models.device_map import fallback_allocate as fallback_allocate
from ..big_models.device_map import infer_auto_device_map as infer_auto_device_map, logger as logger
from ..big_models.load import load_checkpoint_in_model as load_checkpoint_in_model
from ..big_models.load import load_offloaded_weights as load_offloaded_weights, load_state_dict as load_state_dict
from ..big_models.placement import set_module_tensor_to_device as set_module_tensor_to_device
from ..big_models.sizes import _get_proper_dtype as _get_proper_dtype
from ..big_models.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from ..big_models.sizes import check_device_same as check_device_same
from ..big_models.sizes import check_tied_parameters_in_config as check_tied_parameters_in_config
from ..big_models.sizes import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from ..big_models.sizes import compute_module_sizes as compute_module_sizes
from ..big_models.sizes import compute_module_total_buffer_size as compute_module_total_buffer_size
from ..big_models.sizes import dtype_byte_size as dtype_byte_size, find_tied_parameters as find_tied_parameters
from ..big_models.sizes import get_max_layer_size as get_max_layer_size, get_module_leaves as get_module_leaves
from ..big_models.sizes import get_module_size_with_ties as get_module_size_with_ties
from ..big_models.sizes import get_non_persistent_buffers as get_non_persistent_buffers
from ..big_models.sizes import id_tensor_storage as id_tensor_storage, named_module_tensors as named_module_tensors
from ..big_models.sizes import retie_parameters as retie_parameters
from ..checkpointing import convert_file_size_to_int as convert_file_size_to_int
from ..devices.memory import clear_device_cache as clear_device_cache
from ..hooks.align import align_module_device as align_module_device
from ..hooks.align import get_state_dict_from_offload as get_state_dict_from_offload
from ..hooks.align import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from ..hooks.align import has_offloaded_params as has_offloaded_params
from ..parallel.rebind import is_peft_model as is_peft_model
from ..precision.choose import get_grad_scaler as get_grad_scaler
from ..state import get_mixed_precision_context_manager as get_mixed_precision_context_manager
