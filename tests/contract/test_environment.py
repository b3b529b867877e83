"""The names that others rely on: environment variables, YAML keys and launch flags, letter by letter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.settings.option import OptionInfo, options_of
from accelerate.settings.tree import GROUPS, launch_options_of


def prefixed(prefix: str, names: str) -> str:
    return " ".join(prefix + name for name in names.split())


ENVIRONMENT = {
    "run": "ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_DEBUG_MODE "
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS "
    "ACCELERATE_GRADIENT_CLIPPING ACCELERATE_DOWNCAST_BF16 ACCELERATE_TORCH_DEVICE ACCELERATE_CPU_AFFINITY",
    "preemption": "ACCELERATE_SAVE_ON_SIGNAL ACCELERATE_GRACE_SECONDS ACCELERATE_NOTICE_FILE ACCELERATE_NOTICE_URL",
    "batch_parts": "ACCELERATE_BATCH_PARTS",
    "data": "ACCELERATE_BALANCE",
    "diloco": "ACCELERATE_ISLANDS",
    "fingerprints": "ACCELERATE_FINGERPRINT_EVERY",
    "paradigm": "ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_FSDP ACCELERATE_USE_PARALLELISM_CONFIG "
    "ACCELERATE_USE_MEGATRON_LM ACCELERATE_USE_SAGEMAKER",
    "switches": "ACCELERATE_LOG_LEVEL ACCELERATE_ENABLE_RICH ACCELERATE_INIT_INCLUDE_BUFFERS "
    "ACCELERATE_BYPASS_DEVICE_MAP ACCELERATE_ALLOW_CP_STANDALONE ACCELERATE_DEBUG_RDV_FILE FORK_LAUNCHED "
    "USE_TORCH_XLA",
    "compile": "ACCELERATE_DYNAMO_BACKEND ACCELERATE_DYNAMO_MODE ACCELERATE_DYNAMO_USE_FULLGRAPH "
    "ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "fsdp": "FSDP_VERSION FSDP_SHARDING_STRATEGY FSDP_RESHARD_AFTER_FORWARD FSDP_BACKWARD_PREFETCH "
    "FSDP_AUTO_WRAP_POLICY FSDP_OFFLOAD_PARAMS FSDP_IGNORED_MODULES FSDP_STATE_DICT_TYPE FSDP_USE_ORIG_PARAMS "
    "FSDP_SYNC_MODULE_STATES FSDP_FORWARD_PREFETCH FSDP_ACTIVATION_CHECKPOINTING "
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_TRANSFORMER_CLS_TO_WRAP "
    "FSDP_MIN_NUM_PARAMS",
    "deepspeed": "ACCELERATE_DEEPSPEED_CONFIG_FILE ACCELERATE_GRADIENT_ACCUMULATION_STEPS "
    "ACCELERATE_GRADIENT_CLIPPING "
    "ACCELERATE_DEEPSPEED_ZERO_STAGE ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE "
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH "
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH ACCELERATE_DEEPSPEED_ZERO3_INIT "
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES ACCELERATE_FP8_OPT_LEVEL",
    "deepspeed_launch": "ACCELERATE_CONFIG_DS_FIELDS",
    "megatron": prefixed(
        "MEGATRON_LM_",
        "TP_DEGREE PP_DEGREE USE_CUSTOM_FSDP OVERLAP_CPU_OPTIMIZER_D2H_H2D NO_LOAD_OPTIM EOD_MASK_LOSS "
        "NO_SAVE_OPTIM OPTIMIZER_CPU_OFFLOAD USE_PRECISION_AWARE_OPTIMIZER DECODER_LAST_PIPELINE_NUM_LAYERS "
        "RECOMPUTE_GRANULARITY RECOMPUTE_METHOD RECOMPUTE_NUM_LAYERS ATTENTION_BACKEND EXPERT_MODEL_PARALLEL_SIZE "
        "CONTEXT_PARALLEL_SIZE ATTENTION_DROPOUT HIDDEN_DROPOUT ATTENTION_SOFTMAX_IN_FP32 EXPERT_TENSOR_PARALLEL_SIZE "
        "CALCULATE_PER_TOKEN_LOSS USE_ROTARY_POSITION_EMBEDDINGS NUM_MICRO_BATCHES GRADIENT_CLIPPING "
        "SEQUENCE_PARALLELISM RECOMPUTE_ACTIVATIONS USE_DISTRIBUTED_OPTIMIZER",
    ),
    "parallelism": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE PARALLELISM_CONFIG_DP_SHARD_SIZE PARALLELISM_CONFIG_TP_SIZE "
    "PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_CP_BACKEND PARALLELISM_CONFIG_SP_SIZE "
    "PARALLELISM_CONFIG_SP_BACKEND PARALLELISM_CONFIG_PP_SIZE",  # the last one is ours
    "context": "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
    "sequence": "PARALLELISM_CONFIG_SP_SEQ_LENGTH PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE "
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
    "fp8": prefixed(
        "ACCELERATE_FP8_",
        "BACKEND USE_AUTOCAST_DURING_EVAL MARGIN INTERVAL FORMAT AMAX_HISTORY_LEN AMAX_COMPUTE_ALGO "
        "OVERRIDE_FPROP OVERRIDE_DGRAD OVERRIDE_WGRAD USE_MXFP8_BLOCK_SCALING OPT_LEVEL "
        "ENABLE_FSDP_FLOAT8_ALL_GATHER PAD_INNER_DIM",
    ),
    "tpu": "ACCELERATE_IN_TPU_POD",
    "sagemaker": "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
}

TOP_KEYS = (
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank "
    "num_machines gpu_ids "
    "main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity "
    "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env"
)
SAGEMAKER_KEYS = (
    "distributed_type ec2_instance_type iam_role_name image_uri profile region num_machines gpu_ids base_job_name "
    "pytorch_version transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
)
SECTIONS = {
    "fsdp_config": "fsdp_version fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_offload_params "
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch "
    "fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading "
    "fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload",
    "deepspeed_config": "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
    "offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping "
    "zero3_init_flag "
    "zero3_save_16bit_model deepspeed_moe_layer_cls_names deepspeed_multinode_launcher deepspeed_hostfile "
    "deepspeed_exclusion_filter deepspeed_inclusion_filter",
    "dynamo_config": "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic "
    "dynamo_use_regional_compilation",
    "fp8_config": "backend use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo "
    "override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim",
    "parallelism_config": "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
    "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_cp_backend "
    "parallelism_config_cp_comm_strategy parallelism_config_sp_size parallelism_config_sp_backend "
    "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
    "parallelism_config_sp_attn_implementation",
    "megatron_lm_config": "megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches "
    "megatron_lm_sequence_parallelism megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer "
    "megatron_lm_gradient_clipping",
    "mpirun_config": "mpirun_hostfile",
}

FLAGS = (
    "quiet module no_python debug cpu multi_gpu tpu mixed_precision num_processes num_machines "
    "num_cpu_threads_per_process enable_cpu_affinity dynamo_backend dynamo_mode dynamo_use_fullgraph "
    "dynamo_use_dynamic "
    "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm "
    "gpu_ids same_network "
    "machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts "
    "monitor_interval tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16 "
    "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
    "offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model "
    "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher "
    "deepspeed_moe_layer_cls_names fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy "
    "fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch "
    "fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading "
    "fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload "
    "megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_use_custom_fsdp megatron_lm_no_load_optim "
    "megatron_lm_eod_mask_loss megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim "
    "megatron_lm_optimizer_cpu_offload megatron_lm_use_precision_aware_optimizer "
    "megatron_lm_decoder_last_pipeline_num_layers megatron_lm_num_micro_batches megatron_lm_sequence_parallelism "
    "megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping "
    "megatron_lm_recompute_granularity megatron_lm_recompute_method megatron_lm_recompute_num_layers "
    "megatron_lm_attention_backend megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size "
    "megatron_lm_attention_dropout megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 "
    "megatron_lm_expert_tensor_parallel_size megatron_lm_calculate_per_token_loss "
    "megatron_lm_use_rotary_position_embeddings fp8_backend fp8_use_autocast_during_eval fp8_margin fp8_interval "
    "fp8_format fp8_amax_history_len fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level "
    "fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim aws_access_key_id aws_secret_access_key mpirun_hostfile "
    "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size "
    "parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
    "parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length "
    "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation"
)
SHORT_FLAGS = {"-m": "module", "-q": "quiet", "-t": "tee"}
# Documented flags that take no value; every other one takes one.
SWITCHES = (
    "quiet module no_python debug cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
    "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network "
    "tpu_use_cluster tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval preflight slurm_wait save_on_signal "
    "balance"
)

# Defaults of a launched run that the documentation states.
LAUNCHED = {
    "fsdp_version": 1,
    "fsdp_offload_params": False,
    "fsdp_min_num_params": 100_000_000,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": True,
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
    "tee": "0",
    "role": "default",
    "rdzv_backend": "static",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "dynamo_mode": "default",
    "megatron_lm_tp_degree": 1,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_opt_level": "O2",
    "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_pad_inner_dim": True,
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}

# Defaults of the classes, after construction.
DEFAULTS = {
    "run": {"mixed_precision": "no", "gradient_accumulation_steps": 1, "use_cpu": False},
    "fsdp": {
        "fsdp_version": 1,
        "cpu_offload": False,
        "limit_all_gathers": True,
        "use_orig_params": False,
        "sync_module_states": False,
        "forward_prefetch": False,
        "activation_checkpointing": False,
        "cpu_ram_efficient_loading": False,
        "min_num_params": None,
    },
    "deepspeed": {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_stage": 2,
        "is_train_batch_min": True,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "offload_optimizer_nvme_path": "none",
        "offload_param_nvme_path": "none",
        "zero3_save_16bit_model": False,
        "msamp_opt_level": "O1",
    },
    "megatron": {
        "tp_degree": 1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "attention_backend": True,
        "context_parallel_size": 2,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "gradient_clipping": 1.0,
        "weight_decay_incr_style": "constant",
        "lr_decay_style": "linear",
        "eval_iters": 100,
        "eval_interval": 1000,
        "lr_mult": 1.0,
    },
    "compile": {"backend": "NO", "mode": "default", "fullgraph": False, "dynamic": None, "disable": False},
    "data": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
    },
    "accumulation": {
        "num_steps": None,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    },
    "parallelism": {"dp_replicate_size": 1, "cp_backend": "torch", "sp_backend": "deepspeed", "tp_handler": None},
    "sagemaker": {"region": "us-east-1", "num_machines": 1, "gpu_ids": "all", "py_version": "py312"},
}


def rows(group: str) -> tuple[OptionInfo, ...]:
    return options_of(GROUPS[group])


@pytest.mark.parametrize("group", GROUPS)
def test_environment_variables_are_exactly_the_documented_ones(group: str) -> None:
    ours = {name for option in rows(group) for name in option.env}
    assert ours == set(ENVIRONMENT.get(group, "").split())


def test_every_documented_key_is_there() -> None:
    keys = {option.key for group in GROUPS if group != "sagemaker" for option in rows(group) if option.section is None}
    assert set(TOP_KEYS.split()) <= keys
    assert set(SAGEMAKER_KEYS.split()) == {option.key for option in rows("sagemaker") if option.key}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_documented_key_of_a_section_is_there(section: str) -> None:
    keys = {option.key for group in GROUPS for option in rows(group) if option.section == section}
    assert set(SECTIONS[section].split()) <= keys


def test_every_documented_flag_is_there_in_both_spellings() -> None:
    ours = {spelling for option in launch_options_of() for spelling in option.flags}
    ours |= {option.off_flag for option in launch_options_of() if option.off_flag}
    wanted = {f"--{name}" for name in FLAGS.split()} | {
        f"--{name.replace('_', '-')}" for name in FLAGS.split() if name != "no_tpu_cluster"
    }
    assert wanted <= ours
    assert {flag for flag in ours if not flag.startswith("--")} == set(SHORT_FLAGS)


@pytest.mark.parametrize("option", launch_options_of(), ids=lambda option: str(option.flag))
def test_switches_stand_alone_and_other_flags_take_a_value(option: OptionInfo) -> None:
    assert option.dest is not None
    assert option.switch == (option.dest in SWITCHES.split())


@pytest.mark.parametrize("name", LAUNCHED)
def test_defaults_of_a_launched_run(name: str) -> None:
    option = next(option for option in launch_options_of() if option.dest == name)
    assert option.launched == LAUNCHED[name]


@pytest.mark.parametrize("group", DEFAULTS)
def test_defaults_of_the_classes(group: str) -> None:
    built = GROUPS[group]()
    assert {name: getattr(built, name) for name in DEFAULTS[group]} == DEFAULTS[group]


def test_every_option_says_what_it_is_for() -> None:
    assert not [f"{group}.{option.name}" for group in GROUPS for option in rows(group) if len(option.help) < 8]


def test_settings_are_imported_without_torch_and_with_few_modules() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import accelerate.settings.run\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    modules = done.stdout.split()
    ours = [name for name in modules if name.startswith("accelerate")]
    assert {name.partition(".")[0] for name in modules} <= {*sys.stdlib_module_names, "accelerate"}, modules
    # 40 of ours and up to 71 of Python's: 0.03 to 0.06 CPU seconds on a quiet machine, with the package itself.
    assert len(ours) <= 48, ours
    assert len(modules) - len(ours) <= 110, modules
