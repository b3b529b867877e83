"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..big_models.budget import get_balanced_memory as get_balanced_memory, get_max_memory as get_max_memory
from ..big_models.device_map import check_device_map as check_device_map, infer_auto_device_map as infer_auto_device_map
from ..big_models.load import load_checkpoint_in_model as load_checkpoint_in_model
from ..big_models.load import load_offloaded_weights as load_offloaded_weights, load_state_dict as load_state_dict
from ..big_models.offload import extract_submodules_state_dict as extract_submodules_state_dict
from ..big_models.offload import load_offloaded_weight as load_offloaded_weight
from ..big_models.offload import offload_state_dict as offload_state_dict, offload_weight as offload_weight
from ..big_models.offload import OffloadedWeightsLoader as OffloadedWeightsLoader, PrefixedDataset as PrefixedDataset
from ..big_models.offload import save_offload_index as save_offload_index
from ..big_models.placement import set_module_tensor_to_device as set_module_tensor_to_device
from ..big_models.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from ..big_models.sizes import check_tied_parameters_in_config as check_tied_parameters_in_config
from ..big_models.sizes import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from ..big_models.sizes import compute_module_sizes as compute_module_sizes, dtype_byte_size as dtype_byte_size
from ..big_models.sizes import find_tied_parameters as find_tied_parameters, get_max_layer_size as get_max_layer_size
from ..big_models.sizes import id_tensor_storage as id_tensor_storage, named_module_tensors as named_module_tensors
from ..big_models.sizes import retie_parameters as retie_parameters
from ..checkpointing import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from ..checkpointing import convert_file_size_to_int as convert_file_size_to_int, load as load
from ..checkpointing import merge_fsdp_weights as merge_fsdp_weights, save as save
from ..commands.config.default import write_basic_config as write_basic_config
from ..devices.hardware import check_cuda_fp8_capability as check_cuda_fp8_capability
from ..devices.hardware import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from ..devices.hardware import get_current_device_type as get_current_device_type, get_gpu_info as get_gpu_info
from ..devices.hardware import is_bf16_available as is_bf16_available, is_cuda_available as is_cuda_available
from ..devices.hardware import is_fp16_available as is_fp16_available, is_fp8_available as is_fp8_available
from ..devices.hardware import is_habana_gaudi1 as is_habana_gaudi1, is_hpu_available as is_hpu_available
from ..devices.hardware import is_mlu_available as is_mlu_available, is_mps_available as is_mps_available
from ..devices.hardware import is_musa_available as is_musa_available, is_neuron_available as is_neuron_available
from ..devices.hardware import is_npu_available as is_npu_available, is_rocm_available as is_rocm_available
from ..devices.hardware import is_sdaa_available as is_sdaa_available, is_torch_xla_available as is_torch_xla_available
from ..devices.hardware import is_xccl_available as is_xccl_available, is_xpu_available as is_xpu_available
from ..devices.hardware import set_numa_affinity as set_numa_affinity
from ..devices.memory import convert_bytes as convert_bytes, find_executable_batch_size as find_executable_batch_size
from ..devices.memory import release_memory as release_memory
from ..distributed.collectives import broadcast as broadcast, broadcast_object_list as broadcast_object_list
from ..distributed.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from ..distributed.collectives import copy_tensor_to_devices as copy_tensor_to_devices, gather as gather
from ..distributed.collectives import gather_object as gather_object, pad_across_processes as pad_across_processes
from ..distributed.collectives import reduce as reduce
from ..distributed.collectives import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from ..distributed.environment import get_cpu_distributed_information as get_cpu_distributed_information
from ..distributed.process_control import wait_for_everyone as wait_for_everyone
from ..distributed.random import set_seed as set_seed, synchronize_rng_state as synchronize_rng_state
from ..distributed.random import synchronize_rng_states as synchronize_rng_states
from ..guests.deepspeed.engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from ..guests.deepspeed.engine import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from ..guests.deepspeed.engine import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from ..guests.deepspeed.engine import GatheredParameters as GatheredParameters
from ..guests.deepspeed.engine import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from ..guests.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin, DummyOptim as DummyOptim
from ..guests.deepspeed.plugin import DummyScheduler as DummyScheduler
from ..guests.deepspeed.plugin import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from ..guests.deepspeed.plugin import HfDeepSpeedConfig as HfDeepSpeedConfig
from ..guests.megatron.engine import MegatronEngine as MegatronEngine
from ..guests.megatron.engine import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from ..guests.megatron.engine import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from ..guests.megatron.plugin import add_model_config_to_megatron_parser as add_model_config_to_megatron_parser
from ..guests.megatron.plugin import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from ..guests.megatron.plugin import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from ..guests.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from ..guests.megatron.engine import AbstractTrainStep as AbstractTrainStep
from ..guests.megatron.engine import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from ..guests.megatron.engine import BertTrainStep as BertTrainStep
from ..guests.megatron.engine import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from ..guests.megatron.engine import GPTTrainStep as GPTTrainStep, T5TrainStep as T5TrainStep
from ..guests.preemption.policy import PreemptionPolicy as PreemptionPolicy
from ..guests.xla.launcher import install_xla as install_xla
from ..hooks.align import align_module_device as align_module_device, has_offloaded_params as has_offloaded_params
from ..launch.prepared import _filter_args as _filter_args, prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from ..launch.prepared import prepare_multi_gpu_env as prepare_multi_gpu_env
from ..launch.prepared import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from ..launch.prepared import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from ..launch.prepared import prepare_tpu as prepare_tpu, PrepareForLaunch as PrepareForLaunch
from ..launch.prepared import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from ..modules import get_model_tp_size as get_model_tp_size
from ..modules import get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name
from ..modules import merge_dicts as merge_dicts, model_has_dtensor as model_has_dtensor
from ..modules import recursive_getattr as recursive_getattr
from ..names import MODEL_NAME as MODEL_NAME, OPTIMIZER_NAME as OPTIMIZER_NAME
from ..names import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME, RNG_STATE_NAME as RNG_STATE_NAME
from ..names import SAFE_MODEL_NAME as SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from ..names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from ..names import SAMPLER_NAME as SAMPLER_NAME, SCALER_NAME as SCALER_NAME, SCHEDULER_NAME as SCHEDULER_NAME
from ..names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME, WEIGHTS_NAME as WEIGHTS_NAME
from ..names import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from ..nested import concatenate as concatenate, convert_to_fp32 as convert_to_fp32, find_batch_size as find_batch_size
from ..nested import find_device as find_device, get_data_structure as get_data_structure, honor_type as honor_type
from ..nested import ignorant_find_batch_size as ignorant_find_batch_size, initialize_tensors as initialize_tensors
from ..nested import is_namedtuple as is_namedtuple, is_tensor_information as is_tensor_information
from ..nested import is_torch_tensor as is_torch_tensor, listify as listify, pad_input_tensors as pad_input_tensors
from ..nested import recursively_apply as recursively_apply, send_to_device as send_to_device
from ..nested import slice_tensors as slice_tensors, TensorInformation as TensorInformation
from ..optional import is_4bit_bnb_available as is_4bit_bnb_available, is_8bit_bnb_available as is_8bit_bnb_available
from ..optional import is_aim_available as is_aim_available, is_amdsmi_available as is_amdsmi_available
from ..optional import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
from ..optional import is_bnb_available as is_bnb_available, is_boto3_available as is_boto3_available
from ..optional import is_clearml_available as is_clearml_available, is_comet_ml_available as is_comet_ml_available
from ..optional import is_datasets_available as is_datasets_available, is_deepspeed_available as is_deepspeed_available
from ..optional import is_dvclive_available as is_dvclive_available
from ..optional import is_import_timer_available as is_import_timer_available, is_lomo_available as is_lomo_available
from ..optional import is_matplotlib_available as is_matplotlib_available
from ..optional import is_megatron_lm_available as is_megatron_lm_available, is_mlflow_available as is_mlflow_available
from ..optional import is_msamp_available as is_msamp_available, is_pandas_available as is_pandas_available
from ..optional import is_peft_available as is_peft_available, is_pippy_available as is_pippy_available
from ..optional import is_pynvml_available as is_pynvml_available, is_pytest_available as is_pytest_available
from ..optional import is_rich_available as is_rich_available, is_sagemaker_available as is_sagemaker_available
from ..optional import is_schedulefree_available as is_schedulefree_available
from ..optional import is_swanlab_available as is_swanlab_available
from ..optional import is_tensorboard_available as is_tensorboard_available, is_timm_available as is_timm_available
from ..optional import is_torchao_available as is_torchao_available, is_torchdata_available as is_torchdata_available
from ..optional import is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available
from ..optional import is_torchvision_available as is_torchvision_available
from ..optional import is_trackio_available as is_trackio_available
from ..optional import is_transformer_engine_available as is_transformer_engine_available
from ..optional import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
from ..optional import is_transformers_available as is_transformers_available
from ..optional import is_triton_available as is_triton_available, is_wandb_available as is_wandb_available
from ..optional import is_weights_only_available as is_weights_only_available, torchao_required as torchao_required
from ..parallel.compile import compile_regions as compile_regions
from ..parallel.compile import compile_regions_deepspeed as compile_regions_deepspeed
from ..parallel.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from ..parallel.compile import has_compiled_regions as has_compiled_regions, is_compiled_module as is_compiled_module
from ..parallel.fsdp.files import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from ..parallel.fsdp.files import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from ..parallel.fsdp.files import fsdp2_apply_ac as fsdp2_apply_ac, fsdp2_canonicalize_names as fsdp2_canonicalize_names
from ..parallel.fsdp.files import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from ..parallel.fsdp.files import fsdp2_prepare_model as fsdp2_prepare_model
from ..parallel.fsdp.files import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters
from ..parallel.fsdp.files import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler, load_fsdp_model as load_fsdp_model
from ..parallel.fsdp.files import load_fsdp_optimizer as load_fsdp_optimizer, save_fsdp_model as save_fsdp_model
from ..parallel.fsdp.files import save_fsdp_optimizer as save_fsdp_optimizer
from ..parallel.rebind import ensure_weights_retied as ensure_weights_retied
from ..parallel.rebind import extract_model_from_parallel as extract_model_from_parallel, is_peft_model as is_peft_model
from ..plugins.data import DataLoaderConfiguration as DataLoaderConfiguration
from ..plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from ..plugins.fp8 import AORecipeKwargs as AORecipeKwargs, FP8RecipeKwargs as FP8RecipeKwargs
from ..plugins.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs, TERecipeKwargs as TERecipeKwargs
from ..plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from ..plugins.handlers import AutocastKwargs as AutocastKwargs
from ..plugins.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from ..plugins.handlers import GradScalerKwargs as GradScalerKwargs, InitProcessGroupKwargs as InitProcessGroupKwargs
from ..plugins.handlers import KwargsHandler as KwargsHandler, ProfileKwargs as ProfileKwargs
from ..plugins.handlers import ProjectConfiguration as ProjectConfiguration, TorchDynamoPlugin as TorchDynamoPlugin
from ..plugins.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from ..plugins.parallelism import ExpertParallelConfig as ExpertParallelConfig, ParallelismConfig as ParallelismConfig
from ..plugins.parallelism import PipelineParallelConfig as PipelineParallelConfig
from ..plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from ..plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from ..plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from ..plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from ..plugins.quantization import TorchAoQuantizationConfig as TorchAoQuantizationConfig
from ..ports import is_port_in_use as is_port_in_use
from ..precision.base import convert_outputs_to_fp32 as convert_outputs_to_fp32
from ..precision.choose import get_grad_scaler as get_grad_scaler
from ..precision.fp8_ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from ..precision.fp8_ao import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from ..precision.fp8_ao import has_ao_layers as has_ao_layers
from ..precision.fp8_te import apply_fp8_autowrap as apply_fp8_autowrap
from ..precision.fp8_te import contextual_fp8_autocast as contextual_fp8_autocast, convert_model as convert_model
from ..precision.fp8_te import has_transformer_engine_layers as has_transformer_engine_layers
from ..quantize import has_4bit_bnb_layers as has_4bit_bnb_layers, load_and_quantize_model as load_and_quantize_model
from ..settings.env import are_libraries_initialized as are_libraries_initialized
from ..settings.env import clear_environment as clear_environment
from ..settings.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from ..settings.env import get_int_from_env as get_int_from_env, parse_choice_from_env as parse_choice_from_env
from ..settings.env import parse_flag_from_env as parse_flag_from_env, patch_environment as patch_environment
from ..settings.env import purge_accelerate_environment as purge_accelerate_environment, str_to_bool as str_to_bool
from ..settings.labels import ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype
from ..settings.labels import DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType
from ..settings.labels import DynamoBackend as DynamoBackend, LoggerType as LoggerType, PrecisionType as PrecisionType
from ..settings.labels import RNGType as RNGType, SageMakerDistributedType as SageMakerDistributedType
from ..state import deepspeed_required as deepspeed_required
from ..state import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from .tqdm import tqdm as tqdm
from ..versions import check_os_kernel as check_os_kernel, compare_versions as compare_versions
from ..versions import is_torch_version as is_torch_version
from ..versions import MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
from ..versions import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
from . import ao as ao, bnb as bnb, constants as constants, dataclasses as dataclasses, deepspeed as deepspeed
from . import environment as environment, fsdp_utils as fsdp_utils, imports as imports, launch as launch
from . import megatron_lm as megatron_lm, memory as memory, modeling as modeling, offload as offload
from . import operations as operations, other as other, random as random, rich as rich, torch_xla as torch_xla
from . import transformer_engine as transformer_engine, versions as versions
