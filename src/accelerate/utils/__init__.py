"""Import path kept for compatibility: all utilities, each imported from its module when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, because the name of the function is also the name of its file: a later import of the file alone would put
# the module in the function's place.
from .tqdm import tqdm

if TYPE_CHECKING:
    # As many names a line as fit, to keep the file short.
    # isort: off
    from ..checkpointing import clean_state_dict_for_safetensors, load, save
    from ..distributed.environment import get_cpu_distributed_information
    from ..distributed.collectives import CannotPadNestedTensorWarning, TORCH_DISTRIBUTED_OPERATION_TYPES
    from ..distributed.collectives import broadcast
    from ..distributed.collectives import broadcast_object_list, copy_tensor_to_devices, gather, gather_object
    from ..distributed.collectives import pad_across_processes, reduce
    from ..commands.config.default import write_basic_config
    from ..devices.hardware import check_cuda_fp8_capability, check_cuda_p2p_ib_support
    from ..devices.hardware import get_current_device_type
    from ..devices.hardware import get_gpu_info, set_numa_affinity
    from ..guests.xla.launcher import install_xla
    from ..launch.prepared import _filter_args
    from ..launch.prepared import (
        PrepareForLaunch,
        TORCH_LAUNCH_PARAMS,
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_sagemager_args_inputs,
        prepare_simple_launcher_cmd_env,
        prepare_tpu,
    )
    from ..devices.memory import convert_bytes, find_executable_batch_size, release_memory
    from ..modules import get_module_children_bottom_up, get_pretty_name, merge_dicts, model_has_dtensor
    from ..modules import recursive_getattr
    from ..names import MODEL_NAME, OPTIMIZER_NAME, PROFILE_PATTERN_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
    from ..names import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME
    from ..names import SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
    from ..names import WEIGHTS_PATTERN_NAME
    from ..nested import TensorInformation, concatenate, convert_to_fp32, find_batch_size, find_device
    from ..nested import get_data_structure, honor_type, ignorant_find_batch_size, initialize_tensors
    from ..nested import is_namedtuple, is_tensor_information, is_torch_tensor, listify
    from ..nested import pad_input_tensors, recursively_apply, send_to_device, slice_tensors
    from ..optional import is_4bit_bnb_available, is_8bit_bnb_available
    from ..optional import is_aim_available, is_amdsmi_available, is_bitsandbytes_multi_backend_available
    from ..optional import is_bnb_available, is_boto3_available, is_clearml_available
    from ..optional import is_comet_ml_available, is_datasets_available, is_deepspeed_available
    from ..optional import is_dvclive_available, is_import_timer_available, is_lomo_available
    from ..optional import is_matplotlib_available, is_megatron_lm_available, is_mlflow_available
    from ..optional import is_msamp_available, is_pandas_available, is_peft_available, is_pippy_available
    from ..optional import is_pynvml_available, is_pytest_available, is_rich_available
    from ..optional import is_sagemaker_available, is_schedulefree_available, is_swanlab_available
    from ..optional import is_tensorboard_available, is_timm_available, is_torchao_available
    from ..optional import is_torchdata_available, is_torchdata_stateful_dataloader_available
    from ..optional import is_torchvision_available, is_trackio_available
    from ..optional import is_transformer_engine_available, is_transformer_engine_mxfp8_available
    from ..optional import is_transformers_available, is_triton_available, is_wandb_available
    from ..optional import is_weights_only_available, torchao_required
    from ..plugins.handlers import GradientAccumulationPlugin
    from ..plugins.handlers import KwargsHandler
    from ..plugins.data import DataLoaderConfiguration
    from ..plugins.ddp import DistributedDataParallelKwargs
    from ..guests.deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig
    from ..guests.deepspeed.plugin import get_active_deepspeed_plugin
    from ..plugins.handlers import TorchDynamoPlugin
    from ..plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from ..plugins.fsdp import FullyShardedDataParallelPlugin
    from ..guests.megatron.plugin import MegatronLMPlugin
    from ..guests.megatron.plugin import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
    from ..guests.megatron.plugin import add_model_config_to_megatron_parser
    from ..plugins.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from ..plugins.parallelism import ExpertParallelConfig, TorchContextParallelConfig
    from ..plugins.parallelism import TorchTensorParallelConfig
    from ..plugins.parallelism import TorchTensorParallelPlugin
    from ..plugins.parallelism import PipelineParallelConfig
    from ..guests.preemption.policy import PreemptionPolicy
    from ..plugins.handlers import AutocastKwargs, GradScalerKwargs
    from ..plugins.handlers import InitProcessGroupKwargs
    from ..plugins.handlers import ProfileKwargs
    from ..plugins.handlers import ProjectConfiguration
    from ..plugins.quantization import BnbQuantizationConfig, TorchAoQuantizationConfig
    from ..ports import is_port_in_use
    from ..precision.choose import get_grad_scaler
    from ..precision.fp8_ao import convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers
    from ..quantize import has_4bit_bnb_layers, load_and_quantize_model
    from ..precision.fp8_te import apply_fp8_autowrap, contextual_fp8_autocast, convert_model
    from ..precision.fp8_te import has_transformer_engine_layers
    from ..precision.base import convert_outputs_to_fp32
    from ..devices.hardware import is_bf16_available, is_cuda_available, is_fp16_available, is_fp8_available
    from ..devices.hardware import is_habana_gaudi1, is_hpu_available, is_mlu_available, is_mps_available
    from ..devices.hardware import is_musa_available, is_neuron_available, is_npu_available, is_rocm_available
    from ..devices.hardware import is_sdaa_available, is_torch_xla_available, is_xccl_available
    from ..devices.hardware import is_xpu_available
    from ..distributed.process_control import wait_for_everyone
    from ..distributed.random import set_seed, synchronize_rng_state, synchronize_rng_states
    from ..settings.env import are_libraries_initialized, clear_environment
    from ..settings.env import convert_dict_to_env_variables, get_int_from_env, parse_choice_from_env
    from ..settings.env import parse_flag_from_env, patch_environment, purge_accelerate_environment
    from ..settings.env import str_to_bool
    from ..settings.labels import ComputeEnvironment, CustomDtype, DDPCommunicationHookType
    from ..settings.labels import DistributedType, DynamoBackend, LoggerType, PrecisionType, RNGType
    from ..settings.labels import SageMakerDistributedType
    from ..state import deepspeed_required, get_mixed_precision_context_manager
    from ..parallel.compile import compile_regions, compile_regions_deepspeed, compile_regions_fsdp2
    from ..guests.deepspeed.engine import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper
    from ..guests.deepspeed.engine import DeepSpeedSchedulerWrapper, GatheredParameters
    from ..guests.deepspeed.engine import map_pytorch_optim_to_deepspeed
    from ..guests.megatron.engine import MegatronEngine, MegatronLMOptimizerWrapper
    from ..guests.megatron.engine import MegatronLMSchedulerWrapper
    from ..guests.megatron.steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
    from ..guests.megatron.steps import avg_losses_across_data_parallel_group
    from ..guests.megatron.steps import gather_across_data_parallel_groups
    from ..parallel.compile import has_compiled_regions, is_compiled_module
    from ..parallel.rebind import ensure_weights_retied
    from ..modules import get_model_tp_size
    from ..parallel.fsdp.files import disable_fsdp_ram_efficient_loading
    from ..parallel.fsdp.files import enable_fsdp_ram_efficient_loading, fsdp2_apply_ac
    from ..parallel.fsdp.files import fsdp2_canonicalize_names, fsdp2_load_full_state_dict
    from ..parallel.fsdp.files import fsdp2_prepare_model, fsdp2_switch_optimizer_parameters
    from ..parallel.fsdp.files import get_fsdp2_grad_scaler, load_fsdp_model, load_fsdp_optimizer
    from ..parallel.fsdp.files import save_fsdp_model, save_fsdp_optimizer
    from ..parallel.rebind import extract_model_from_parallel, is_peft_model
    from ..versions import MITA_PROFILING_AVAILABLE_PYTORCH_VERSION
    from ..versions import XPU_PROFILING_AVAILABLE_PYTORCH_VERSION, check_os_kernel, compare_versions
    from ..versions import is_torch_version
    from ..checkpointing import convert_file_size_to_int, merge_fsdp_weights
    from ..big_models.budget import get_balanced_memory, get_max_memory
    from ..big_models.load import load_checkpoint_in_model, load_offloaded_weights, load_state_dict
    from ..big_models.placement import set_module_tensor_to_device
    from ..big_models.device_map import check_device_map, infer_auto_device_map
    from ..big_models.sizes import calculate_maximum_sizes, compute_module_sizes, dtype_byte_size
    from ..big_models.sizes import get_max_layer_size
    from ..big_models.sizes import id_tensor_storage, named_module_tensors
    from ..big_models.sizes import check_tied_parameters_in_config, check_tied_parameters_on_same_device
    from ..big_models.sizes import find_tied_parameters, retie_parameters
    from ..hooks.align import align_module_device, has_offloaded_params
    from ..big_models.offload import OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict
    from ..big_models.offload import load_offloaded_weight, offload_state_dict, offload_weight
    from ..big_models.offload import save_offload_index
    # isort: on

# Name -> the module that defines it.
_DEFINED_IN = {
    "AbstractTrainStep": "guests.megatron.steps", "BertTrainStep": "guests.megatron.steps",
    "GPTTrainStep": "guests.megatron.steps", "T5TrainStep": "guests.megatron.steps",
    "avg_losses_across_data_parallel_group": "guests.megatron.steps",
    "gather_across_data_parallel_groups": "guests.megatron.steps",
    "MegatronLMDummyDataLoader": "guests.megatron.plugin",
    "MegatronLMDummyScheduler": "guests.megatron.plugin", "MegatronEngine": "guests.megatron.engine",
    "MegatronLMOptimizerWrapper": "guests.megatron.engine",
    "MegatronLMSchedulerWrapper": "guests.megatron.engine", "DeepSpeedEngineWrapper": "guests.deepspeed.engine",
    "DeepSpeedOptimizerWrapper": "guests.deepspeed.engine",
    "DeepSpeedSchedulerWrapper": "guests.deepspeed.engine", "GatheredParameters": "guests.deepspeed.engine",
    "map_pytorch_optim_to_deepspeed": "guests.deepspeed.engine", "DummyOptim": "guests.deepspeed.plugin",
    "DummyScheduler": "guests.deepspeed.plugin", "HfDeepSpeedConfig": "guests.deepspeed.plugin",
    "get_active_deepspeed_plugin": "guests.deepspeed.plugin", "ensure_weights_retied": "parallel.rebind",
    "get_model_tp_size": "modules", "disable_fsdp_ram_efficient_loading": "parallel.fsdp.files",
    "enable_fsdp_ram_efficient_loading": "parallel.fsdp.files", "fsdp2_apply_ac": "parallel.fsdp.files",
    "fsdp2_canonicalize_names": "parallel.fsdp.files", "fsdp2_load_full_state_dict": "parallel.fsdp.files",
    "fsdp2_prepare_model": "parallel.fsdp.files", "fsdp2_switch_optimizer_parameters": "parallel.fsdp.files",
    "get_fsdp2_grad_scaler": "parallel.fsdp.files", "load_fsdp_model": "parallel.fsdp.files",
    "load_fsdp_optimizer": "parallel.fsdp.files", "merge_fsdp_weights": "checkpointing",
    "save_fsdp_model": "parallel.fsdp.files", "save_fsdp_optimizer": "parallel.fsdp.files",
    "AORecipeKwargs": "plugins.fp8", "AutocastKwargs": "plugins.handlers", "apply_fp8_autowrap": "precision.fp8_te",
    "contextual_fp8_autocast": "precision.fp8_te", "convert_model": "precision.fp8_te",
    "convert_model_to_fp8_ao": "precision.fp8_ao", "filter_first_and_last_linear_layers": "precision.fp8_ao",
    "has_ao_layers": "precision.fp8_ao", "has_transformer_engine_layers": "precision.fp8_te",
    "BnbQuantizationConfig": "plugins.quantization", "TorchAoQuantizationConfig": "plugins.quantization",
    "has_4bit_bnb_layers": "quantize", "load_and_quantize_model": "quantize",
    "CannotPadNestedTensorWarning": "distributed.collectives", "ComputeEnvironment": "settings.labels",
    "CustomDtype": "settings.labels", "DDPCommunicationHookType": "settings.labels",
    "DataLoaderConfiguration": "plugins.data", "DeepSpeedPlugin": "guests.deepspeed.plugin",
    "DeepSpeedSequenceParallelConfig": "plugins.parallelism", "DistributedDataParallelKwargs": "plugins.ddp",
    "DistributedType": "settings.labels", "DynamoBackend": "settings.labels", "FP8RecipeKwargs": "plugins.fp8",
    "FullyShardedDataParallelPlugin": "plugins.fsdp", "GradScalerKwargs": "plugins.handlers",
    "GradientAccumulationPlugin": "plugins.handlers", "InitProcessGroupKwargs": "plugins.handlers",
    "KwargsHandler": "plugins.handlers", "LoggerType": "settings.labels",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION": "versions", "MODEL_NAME": "names", "MSAMPRecipeKwargs": "plugins.fp8",
    "MegatronLMPlugin": "guests.megatron.plugin", "OPTIMIZER_NAME": "names",
    "OffloadedWeightsLoader": "big_models.offload",
    "PROFILE_PATTERN_NAME": "names", "ParallelismConfig": "plugins.parallelism", "PrecisionType": "settings.labels",
    "PrefixedDataset": "big_models.offload", "PrepareForLaunch": "launch.prepared",
    "ProfileKwargs": "plugins.handlers", "ProjectConfiguration": "plugins.handlers", "RNGType": "settings.labels",
    "RNG_STATE_NAME": "names", "SAFE_MODEL_NAME": "names", "SAFE_WEIGHTS_INDEX_NAME": "names",
    "SAFE_WEIGHTS_NAME": "names", "SAFE_WEIGHTS_PATTERN_NAME": "names", "SAMPLER_NAME": "names",
    "SCALER_NAME": "names", "SCHEDULER_NAME": "names", "SageMakerDistributedType": "settings.labels",
    "TERecipeKwargs": "plugins.fp8", "TORCH_DISTRIBUTED_OPERATION_TYPES": "distributed.collectives",
    "TORCH_LAUNCH_PARAMS": "launch.prepared", "TensorInformation": "nested",
    "PreemptionPolicy": "guests.preemption.policy",
    "TorchContextParallelConfig": "plugins.parallelism", "ExpertParallelConfig": "plugins.parallelism",
    "PipelineParallelConfig": "plugins.parallelism", "TorchDynamoPlugin": "plugins.handlers",
    "TorchTensorParallelConfig": "plugins.parallelism", "TorchTensorParallelPlugin": "plugins.parallelism",
    "WEIGHTS_INDEX_NAME": "names", "WEIGHTS_NAME": "names", "WEIGHTS_PATTERN_NAME": "names",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION": "versions",
    "add_model_config_to_megatron_parser": "guests.megatron.plugin",
    "align_module_device": "hooks.align", "are_libraries_initialized": "settings.env",
    "broadcast": "distributed.collectives", "broadcast_object_list": "distributed.collectives",
    "calculate_maximum_sizes": "big_models.sizes", "check_cuda_fp8_capability": "devices.hardware",
    "check_cuda_p2p_ib_support": "devices.hardware", "check_device_map": "big_models.device_map",
    "check_os_kernel": "versions", "check_tied_parameters_in_config": "big_models.sizes",
    "check_tied_parameters_on_same_device": "big_models.sizes", "clean_state_dict_for_safetensors": "checkpointing",
    "clear_environment": "settings.env", "compare_versions": "versions", "compile_regions": "parallel.compile",
    "compile_regions_deepspeed": "parallel.compile", "compile_regions_fsdp2": "parallel.compile",
    "compute_module_sizes": "big_models.sizes", "concatenate": "nested", "convert_bytes": "devices.memory",
    "convert_dict_to_env_variables": "settings.env", "convert_file_size_to_int": "checkpointing",
    "convert_outputs_to_fp32": "precision.base", "convert_to_fp32": "nested",
    "copy_tensor_to_devices": "distributed.collectives", "deepspeed_required": "state",
    "dtype_byte_size": "big_models.sizes", "extract_model_from_parallel": "parallel.rebind",
    "extract_submodules_state_dict": "big_models.offload", "find_batch_size": "nested", "find_device": "nested",
    "find_executable_batch_size": "devices.memory", "find_tied_parameters": "big_models.sizes",
    "gather": "distributed.collectives", "gather_object": "distributed.collectives",
    "get_balanced_memory": "big_models.budget", "get_cpu_distributed_information": "distributed.environment",
    "get_current_device_type": "devices.hardware", "get_data_structure": "nested", "get_gpu_info": "devices.hardware",
    "get_grad_scaler": "precision.choose", "get_int_from_env": "settings.env",
    "get_max_layer_size": "big_models.sizes", "get_max_memory": "big_models.budget",
    "get_mixed_precision_context_manager": "state", "get_module_children_bottom_up": "modules",
    "get_pretty_name": "modules", "has_compiled_regions": "parallel.compile", "has_offloaded_params": "hooks.align",
    "honor_type": "nested", "id_tensor_storage": "big_models.sizes", "ignorant_find_batch_size": "nested",
    "infer_auto_device_map": "big_models.device_map", "initialize_tensors": "nested",
    "is_4bit_bnb_available": "optional", "is_8bit_bnb_available": "optional", "is_aim_available": "optional",
    "is_amdsmi_available": "optional", "is_bf16_available": "devices.hardware",
    "is_bitsandbytes_multi_backend_available": "optional", "is_bnb_available": "optional",
    "is_boto3_available": "optional", "is_clearml_available": "optional", "is_comet_ml_available": "optional",
    "is_compiled_module": "parallel.compile", "is_cuda_available": "devices.hardware",
    "is_datasets_available": "optional", "is_deepspeed_available": "optional", "is_dvclive_available": "optional",
    "is_fp16_available": "devices.hardware", "is_fp8_available": "devices.hardware",
    "is_habana_gaudi1": "devices.hardware", "is_hpu_available": "devices.hardware",
    "is_import_timer_available": "optional", "is_lomo_available": "optional", "is_matplotlib_available": "optional",
    "is_megatron_lm_available": "optional", "is_mlflow_available": "optional", "is_mlu_available": "devices.hardware",
    "is_mps_available": "devices.hardware", "is_msamp_available": "optional", "is_musa_available": "devices.hardware",
    "is_namedtuple": "nested", "is_neuron_available": "devices.hardware", "is_npu_available": "devices.hardware",
    "is_pandas_available": "optional", "is_peft_available": "optional", "is_peft_model": "parallel.rebind",
    "is_pippy_available": "optional", "is_port_in_use": "ports", "is_pynvml_available": "optional",
    "is_pytest_available": "optional", "is_rich_available": "optional", "is_rocm_available": "devices.hardware",
    "is_sagemaker_available": "optional", "is_schedulefree_available": "optional",
    "is_sdaa_available": "devices.hardware", "is_swanlab_available": "optional", "is_tensor_information": "nested",
    "is_tensorboard_available": "optional", "is_timm_available": "optional", "is_torch_tensor": "nested",
    "is_torch_version": "versions", "is_torch_xla_available": "devices.hardware", "is_torchao_available": "optional",
    "is_torchdata_available": "optional", "is_torchdata_stateful_dataloader_available": "optional",
    "is_torchvision_available": "optional", "is_trackio_available": "optional",
    "is_transformer_engine_available": "optional", "is_transformer_engine_mxfp8_available": "optional",
    "is_transformers_available": "optional", "is_triton_available": "optional", "is_wandb_available": "optional",
    "is_weights_only_available": "optional", "is_xccl_available": "devices.hardware",
    "is_xpu_available": "devices.hardware", "listify": "nested", "load": "checkpointing",
    "load_checkpoint_in_model": "big_models.load", "load_offloaded_weight": "big_models.offload",
    "load_offloaded_weights": "big_models.load", "load_state_dict": "big_models.load", "merge_dicts": "modules",
    "model_has_dtensor": "modules", "named_module_tensors": "big_models.sizes",
    "offload_state_dict": "big_models.offload", "offload_weight": "big_models.offload",
    "pad_across_processes": "distributed.collectives", "pad_input_tensors": "nested",
    "parse_choice_from_env": "settings.env", "parse_flag_from_env": "settings.env",
    "patch_environment": "settings.env", "_filter_args": "launch.prepared", "install_xla": "guests.xla.launcher",
    "prepare_deepspeed_cmd_env": "launch.prepared", "prepare_multi_gpu_env": "launch.prepared",
    "prepare_sagemager_args_inputs": "launch.prepared", "prepare_tpu": "launch.prepared",
    "prepare_simple_launcher_cmd_env": "launch.prepared", "purge_accelerate_environment": "settings.env",
    "recursive_getattr": "modules", "recursively_apply": "nested", "reduce": "distributed.collectives",
    "release_memory": "devices.memory", "retie_parameters": "big_models.sizes", "save": "checkpointing",
    "save_offload_index": "big_models.offload", "send_to_device": "nested",
    "set_module_tensor_to_device": "big_models.placement", "set_numa_affinity": "devices.hardware",
    "set_seed": "distributed.random", "slice_tensors": "nested", "str_to_bool": "settings.env",
    "synchronize_rng_state": "distributed.random", "synchronize_rng_states": "distributed.random",
    "torchao_required": "optional", "wait_for_everyone": "distributed.process_control",
    "write_basic_config": "commands.config.default",
}  # fmt: skip

_MODULES = (
    "ao",
    "constants",
    "dataclasses",
    "deepspeed",
    "environment",
    "fsdp_utils",
    "imports",
    "launch",
    "devices.memory",
    "modeling",
    "big_models.offload",
    "operations",
    "other",
    "random",
    "tqdm",
    "transformer_engine",
    "versions",
)

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronEngine",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "_filter_args",
    "AORecipeKwargs", "AutocastKwargs", "BnbQuantizationConfig", "CannotPadNestedTensorWarning",
    "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedPlugin", "DeepSpeedSchedulerWrapper",
    "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs", "DistributedType", "DummyOptim",
    "DummyScheduler", "DynamoBackend", "FP8RecipeKwargs", "FullyShardedDataParallelPlugin",
    "GatheredParameters", "GradScalerKwargs", "GradientAccumulationPlugin", "HfDeepSpeedConfig",
    "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "MODEL_NAME", "MSAMPRecipeKwargs", "MegatronLMPlugin", "OPTIMIZER_NAME", "OffloadedWeightsLoader",
    "PROFILE_PATTERN_NAME", "ParallelismConfig", "PrecisionType", "PrefixedDataset", "PrepareForLaunch",
    "ProfileKwargs", "ProjectConfiguration", "RNGType", "RNG_STATE_NAME", "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME",
    "SCALER_NAME", "SCHEDULER_NAME", "SageMakerDistributedType", "TERecipeKwargs",
    "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_LAUNCH_PARAMS", "TensorInformation",
    "PreemptionPolicy", "ExpertParallelConfig", "PipelineParallelConfig", "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig", "TorchTensorParallelPlugin", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "add_model_config_to_megatron_parser", "align_module_device",
    "apply_fp8_autowrap", "are_libraries_initialized", "broadcast", "broadcast_object_list",
    "calculate_maximum_sizes", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support", "check_device_map",
    "check_os_kernel", "check_tied_parameters_in_config", "check_tied_parameters_on_same_device",
    "clean_state_dict_for_safetensors", "clear_environment", "compare_versions", "compile_regions",
    "compile_regions_deepspeed", "compile_regions_fsdp2", "compute_module_sizes", "concatenate",
    "contextual_fp8_autocast", "convert_bytes", "convert_dict_to_env_variables", "convert_file_size_to_int",
    "convert_model", "convert_model_to_fp8_ao", "convert_outputs_to_fp32", "convert_to_fp32",
    "copy_tensor_to_devices", "deepspeed_required", "disable_fsdp_ram_efficient_loading", "dtype_byte_size",
    "enable_fsdp_ram_efficient_loading", "ensure_weights_retied", "extract_model_from_parallel",
    "extract_submodules_state_dict", "filter_first_and_last_linear_layers", "find_batch_size", "find_device",
    "find_executable_batch_size", "find_tied_parameters", "fsdp2_apply_ac", "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict", "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "gather",
    "gather_object", "get_active_deepspeed_plugin", "get_balanced_memory", "get_cpu_distributed_information",
    "get_current_device_type", "get_data_structure", "get_fsdp2_grad_scaler", "get_gpu_info",
    "get_grad_scaler", "get_int_from_env", "get_max_layer_size", "get_max_memory",
    "get_mixed_precision_context_manager", "get_model_tp_size", "get_module_children_bottom_up", "get_pretty_name",
    "TorchAoQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model",
    "has_ao_layers", "has_compiled_regions", "has_offloaded_params", "has_transformer_engine_layers",
    "honor_type", "id_tensor_storage", "ignorant_find_batch_size", "infer_auto_device_map",
    "initialize_tensors", "install_xla", "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available",
    "is_amdsmi_available", "is_bf16_available", "is_bitsandbytes_multi_backend_available", "is_bnb_available",
    "is_boto3_available", "is_clearml_available", "is_comet_ml_available", "is_compiled_module",
    "is_cuda_available", "is_datasets_available", "is_deepspeed_available", "is_dvclive_available",
    "is_fp16_available", "is_fp8_available", "is_habana_gaudi1", "is_hpu_available",
    "is_import_timer_available", "is_lomo_available", "is_matplotlib_available", "is_megatron_lm_available",
    "is_mlflow_available", "is_mlu_available", "is_mps_available", "is_msamp_available", "is_musa_available",
    "is_namedtuple", "is_neuron_available", "is_npu_available", "is_pandas_available", "is_peft_available",
    "is_peft_model", "is_pippy_available", "is_port_in_use", "is_pynvml_available", "is_pytest_available",
    "is_rich_available", "is_rocm_available", "is_sagemaker_available", "is_schedulefree_available",
    "is_sdaa_available", "is_swanlab_available", "is_tensor_information", "is_tensorboard_available",
    "is_timm_available", "is_torch_tensor", "is_torch_version", "is_torch_xla_available",
    "is_torchao_available", "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available", "is_trackio_available", "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available", "is_transformers_available", "is_triton_available",
    "is_wandb_available", "is_weights_only_available", "is_xccl_available", "is_xpu_available", "listify",
    "load", "load_checkpoint_in_model", "load_fsdp_model", "load_fsdp_optimizer", "load_offloaded_weight",
    "load_offloaded_weights", "load_state_dict", "map_pytorch_optim_to_deepspeed", "merge_dicts",
    "merge_fsdp_weights", "model_has_dtensor", "named_module_tensors", "offload_state_dict", "offload_weight",
    "pad_across_processes", "pad_input_tensors", "parse_choice_from_env", "parse_flag_from_env",
    "patch_environment", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
    "purge_accelerate_environment", "recursive_getattr", "recursively_apply", "reduce", "release_memory",
    "retie_parameters", "save", "save_fsdp_model", "save_fsdp_optimizer", "save_offload_index",
    "send_to_device", "set_module_tensor_to_device", "set_numa_affinity", "set_seed", "slice_tensors",
    "str_to_bool", "synchronize_rng_state", "synchronize_rng_states", "torchao_required", "tqdm",
    "wait_for_everyone", "write_basic_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f"accelerate.{_DEFINED_IN[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_DEFINED_IN, *_MODULES})
