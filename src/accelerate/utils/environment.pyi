"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..devices.hardware import check_cuda_fp8_capability as check_cuda_fp8_capability
from ..devices.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from ..devices.hardware import get_current_device_type as get_current_device_type
from ..devices.hardware import get_driver_version as get_driver_version, get_gpu_info as get_gpu_info
from ..devices.hardware import override_numa_affinity as override_numa_affinity, set_numa_affinity as set_numa_affinity
from ..distributed.environment import CPUInformation as CPUInformation
from ..distributed.environment import get_cpu_distributed_information as get_cpu_distributed_information
from ..settings.env import are_libraries_initialized as are_libraries_initialized
from ..settings.env import clear_environment as clear_environment
from ..settings.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from ..settings.env import get_int_from_env as get_int_from_env, parse_choice_from_env as parse_choice_from_env
from ..settings.env import parse_flag_from_env as parse_flag_from_env, patch_environment as patch_environment
from ..settings.env import purge_accelerate_environment as purge_accelerate_environment, str_to_bool as str_to_bool
