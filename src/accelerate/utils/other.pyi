"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..checkpointing import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors, load as load
from ..checkpointing import save as save
from ..devices.memory import convert_bytes as convert_bytes
from ..distributed.process_control import wait_for_everyone as wait_for_everyone
from ..guests.xla.launcher import install_xla as install_xla
from ..modules import get_model_tp_size as get_model_tp_size
from ..modules import get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name
from ..modules import merge_dicts as merge_dicts, model_has_dtensor as model_has_dtensor
from ..modules import recursive_getattr as recursive_getattr
from ..parallel.compile import compile_regions as compile_regions
from ..parallel.compile import compile_regions_deepspeed as compile_regions_deepspeed
from ..parallel.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from ..parallel.compile import has_compiled_regions as has_compiled_regions, has_repeated_blocks as has_repeated_blocks
from ..parallel.compile import is_compiled_module as is_compiled_module, is_repeated_blocks as is_repeated_blocks
from ..parallel.rebind import extract_model_from_parallel as extract_model_from_parallel
from ..ports import get_free_port as get_free_port, is_port_in_use as is_port_in_use
from ..versions import check_os_kernel as check_os_kernel
