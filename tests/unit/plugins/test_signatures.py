"""The documented constructors: names, order and defaults of arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from accelerate.plugins.ddp import DistributedDataParallelKwargs
from accelerate.plugins.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accelerate.plugins.quantization import BnbQuantizationConfig
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, MegatronLMPlugin

#: Class -> its arguments, in order. `name` alone: the default is None.
DOCUMENTED: dict[type, str] = {
    AutocastKwargs: "enabled=True cache_enabled",
    GradScalerKwargs: "init_scale=65536.0 growth_factor=2.0 backoff_factor=0.5 growth_interval=2000 enabled=True",
    InitProcessGroupKwargs: "backend='nccl' init_method timeout",
    DistributedDataParallelKwargs: "dim=0 broadcast_buffers=True bucket_cap_mb=25 find_unused_parameters=False "
    "check_reduction=False gradient_as_bucket_view=False static_graph=False comm_hook='no' comm_wrapper='no'",
    ProfileKwargs: "activities schedule_option on_trace_ready record_shapes=False profile_memory=False "
    "with_stack=False with_flops=False with_modules=False output_trace_dir",
    DataLoaderConfiguration: "split_batches=False dispatch_batches even_batches=True use_seedable_sampler=False "
    "data_seed non_blocking=False use_stateful_dataloader=False",
    ProjectConfiguration: "project_dir logging_dir automatic_checkpoint_naming=False total_limit iteration=0 "
    "save_on_each_node=False",
    GradientAccumulationPlugin: "num_steps adjust_scheduler=True sync_with_dataloader=True sync_each_batch=False",
    TorchDynamoPlugin: "backend mode fullgraph dynamic options disable=False use_regional_compilation",
    AORecipeKwargs: "config module_filter_func pad_inner_dim enable_fsdp_float8_all_gather",
    TERecipeKwargs: "use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo "
    "override_linear_precision use_mxfp8_block_scaling",
    MSAMPRecipeKwargs: "opt_level",
    FP8RecipeKwargs: "opt_level use_autocast_during_eval margin interval fp8_format amax_history_len "
    "amax_compute_algo override_linear_precision use_mxfp8_block_scaling backend",
    FullyShardedDataParallelPlugin: "fsdp_version sharding_strategy reshard_after_forward backward_prefetch "
    "mixed_precision_policy auto_wrap_policy cpu_offload ignored_modules state_dict_type state_dict_config "
    "optim_state_dict_config limit_all_gathers=True use_orig_params param_init_fn sync_module_states "
    "forward_prefetch activation_checkpointing activation_checkpointing_offload cpu_ram_efficient_loading "
    "transformer_cls_names_to_wrap min_num_params",
    DeepSpeedPlugin: "hf_ds_config gradient_accumulation_steps gradient_clipping zero_stage is_train_batch_min=True "
    "offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
    "zero3_init_flag zero3_save_16bit_model transformer_moe_cls_names enable_msamp msamp_opt_level",
    DummyOptim: "params=<required> lr=0.001 weight_decay=0",
    DummyScheduler: "optimizer=<required> total_num_steps warmup_num_steps=0 lr_scheduler_callable",
    MegatronLMPlugin: "tp_degree pp_degree use_custom_fsdp overlap_cpu_optimizer_d2h_h2d no_load_optim "
    "eod_mask_loss no_save_optim optimizer_cpu_offload use_precision_aware_optimizer "
    "decoder_last_pipeline_num_layers recompute_granularity recompute_method recompute_num_layers "
    "attention_backend expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout "
    "attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss "
    "use_rotary_position_embeddings num_micro_batches gradient_clipping sequence_parallelism "
    "recompute_activations use_distributed_optimizer pipeline_model_parallel_split_rank "
    "num_layers_per_virtual_pipeline_stage is_train_batch_min=True train_iters train_samples "
    "weight_decay_incr_style='constant' start_weight_decay end_weight_decay lr_decay_style='linear' "
    "lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr=0 "
    "consumed_samples no_wd_decay_cond scale_lr_cond lr_mult=1.0 megatron_dataset_flag=False seq_length "
    "encoder_seq_length decoder_seq_length tensorboard_dir set_all_logging_options=False eval_iters=100 "
    "eval_interval=1000 return_logits=False custom_train_step_class custom_train_step_kwargs "
    "custom_model_provider_function custom_prepare_model_function custom_megatron_datasets_provider_function "
    "custom_get_batch_function custom_loss_function other_megatron_args",
    ParallelismConfig: "dp_replicate_size dp_shard_size tp_size cp_size cp_backend sp_size sp_backend tp_handler "
    "cp_handler sp_handler",
    TorchTensorParallelPlugin: "tp_size=1 torch_device_mesh",
    TorchTensorParallelConfig: "enable_async_tp=False",
    TorchContextParallelConfig: "cp_comm_strategy",
    DeepSpeedSequenceParallelConfig: "sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    BnbQuantizationConfig: "load_in_8bit=False llm_int8_threshold=6.0 load_in_4bit=False bnb_4bit_quant_type='fp4' "
    "bnb_4bit_use_double_quant=False bnb_4bit_compute_dtype='fp16' torch_dtype skip_modules keep_in_fp32_modules",
}


def _shown(parameter: inspect.Parameter) -> str:
    default: Any = parameter.default
    if default is None:
        return parameter.name
    return f"{parameter.name}={'<required>' if default is parameter.empty else repr(default)}"


@pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)
def test_constructor_has_the_documented_arguments_in_order(cls: type) -> None:
    documented = DOCUMENTED[cls].split()
    found = [_shown(parameter) for parameter in inspect.signature(cls).parameters.values()]
    assert found[: len(documented)] == documented
    ours = {
        AutocastKwargs: ["output_dtype"],
        DataLoaderConfiguration: [
            "index_free_shuffle",
            "prefetch_to_device",
            "augment_by_sample",
            "reseed_workers",
            "already_sharded",
            "token_budget",
            "balance",
            "length_of",
            "packed",
        ],
        ProjectConfiguration: [
            "checkpoint_format",
            "keep_every",
            "best_metric",
            "best_mode",
            "keep_best",
            "save_asynchronously",
            "compare_replicas",
        ],
        DistributedDataParallelKwargs: ["comm_state_option"],
        ParallelismConfig: ["pp_size", "pp_handler", "ep_size", "ep_handler"],
        TorchTensorParallelConfig: ["plan"],
        DummyOptim: ["kwargs"],
        DummyScheduler: ["kwargs"],
    }
    assert [name.partition("=")[0] for name in found[len(documented) :]] == ours.get(cls, [])
