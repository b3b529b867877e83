"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
# ruff: noqa: F401, F403

# The public names of the submodules, but for those imported without `as`, which aren't names of this address.
from .ao import *
from .ao import filter_linear_layers, find_first_last_linear_layers
from .dataclasses import *
from .dataclasses import BaseEnum, FP8BackendType, get_module_class_from_name
from .deepspeed import *
from .environment import *
from .environment import CPUInformation, get_driver_version, override_numa_affinity
from .fsdp_utils import *
from .fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from .imports import *
from .imports import is_numpy_available, is_torch_distributed_available, is_tqdm_available
from .megatron_lm import *
from .modeling import *
from .modeling import check_device_same, clean_device_map, clear_device_cache, compute_module_total_buffer_size
from .modeling import fallback_allocate, get_module_leaves, get_module_size_with_ties, get_non_persistent_buffers
from .modeling import get_state_dict_from_offload, get_state_dict_offloaded_model, logger
from .offload import *
from .operations import *
from .operations import chained_operation, ConvertOutputsToFp32, DistributedOperationException, gather_tensor_shape
from .operations import get_shape, is_torch_xpu_tensor, verify_operation
from .other import *
from .other import get_free_port, has_repeated_blocks, is_repeated_blocks
from .transformer_engine import *

# Names that no stub of a submodule lists, and those of `bnb` and `constants`, of which many would have to be left out.
from ..commands.config.default import write_basic_config as write_basic_config
from ..devices.memory import find_executable_batch_size as find_executable_batch_size, release_memory as release_memory
from ..distributed.collectives import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from ..distributed.random import set_seed as set_seed, synchronize_rng_state as synchronize_rng_state
from ..distributed.random import synchronize_rng_states as synchronize_rng_states
from ..guests.preemption.policy import PreemptionPolicy as PreemptionPolicy
from ..launch.prepared import _filter_args as _filter_args, prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from ..launch.prepared import prepare_multi_gpu_env as prepare_multi_gpu_env
from ..launch.prepared import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from ..launch.prepared import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from ..launch.prepared import prepare_tpu as prepare_tpu, PrepareForLaunch as PrepareForLaunch
from ..launch.prepared import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from ..names import MODEL_NAME as MODEL_NAME, OPTIMIZER_NAME as OPTIMIZER_NAME
from ..names import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME, RNG_STATE_NAME as RNG_STATE_NAME
from ..names import SAFE_MODEL_NAME as SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from ..names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from ..names import SAMPLER_NAME as SAMPLER_NAME, SCALER_NAME as SCALER_NAME, SCHEDULER_NAME as SCHEDULER_NAME
from ..names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME, WEIGHTS_NAME as WEIGHTS_NAME
from ..names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from ..plugins.parallelism import ExpertParallelConfig as ExpertParallelConfig
from ..plugins.parallelism import PipelineParallelConfig as PipelineParallelConfig
from ..plugins.quantization import TorchAoQuantizationConfig as TorchAoQuantizationConfig
from ..quantize import has_4bit_bnb_layers as has_4bit_bnb_layers, load_and_quantize_model as load_and_quantize_model
from ..state import deepspeed_required as deepspeed_required
from .tqdm import tqdm as tqdm
from ..versions import compare_versions as compare_versions, is_torch_version as is_torch_version
from ..versions import MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
from ..versions import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
from . import ao as ao, bnb as bnb, constants as constants, dataclasses as dataclasses, deepspeed as deepspeed
from . import environment as environment, fsdp_utils as fsdp_utils, imports as imports, launch as launch
from . import megatron_lm as megatron_lm, memory as memory, modeling as modeling, offload as offload
from . import operations as operations, other as other, random as random, rich as rich, torch_xla as torch_xla
from . import transformer_engine as transformer_engine, versions as versions
