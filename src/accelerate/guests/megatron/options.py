"""Options of Megatron-LM, their checks, and the questions of ``accelerate config`` about them.

It is imported with the settings, so torch isn't.
"""

from __future__ import annotations

import sys
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from ...errors import SettingError
from ...optional import MEGATRON_REMEDY, can_be_found
from ...settings.option import Group, OptionGroup, option, option_group

if TYPE_CHECKING:
    from ...commands.config.questions import Questionnaire
    from ...settings.tree import Settings

#: The use of an option: an argument of Megatron-LM, one of its schedule's, or none of them: Accelerate reads it.
Use = Literal["argument", "schedule", "own"]
_USE: Final = "accelerate.megatron"


def _used_as(use: Use, declared: Any) -> Any:
    return field(default=None, metadata={**declared.metadata, _USE: use})


def _only_python(default: Any, help: str, *, use: Use = "argument") -> Any:
    """Declare an option that is neither a variable, nor a key, nor a flag."""
    return _used_as(use, option(default, help, env=None, key=None, flag=None))


@option_group
class MegatronOptions(
    OptionGroup,
    title="Megatron-LM",
    env="MEGATRON_LM_",
    section="megatron_lm_config",
    key="megatron_lm_",
    flag="megatron_lm_",
):
    """Degrees of parallelism and training arguments that Megatron-LM takes."""

    tp_degree: int = option(
        1, "Tensor parallel degree.", minimum=1, question="What is the Tensor Parallelism degree/size?", flag_default=1
    )
    pp_degree: int = option(
        1,
        "Pipeline parallel degree.",
        minimum=1,
        question="What is the Pipeline Parallelism degree/size?",
        flag_default=1,
    )
    use_custom_fsdp: bool = option(False, "Use Megatron's own fully sharded data parallel.", flag_default=False)
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        False, "Overlap the CPU optimizer's step with its copies to and from the device.", flag_default=False
    )
    no_load_optim: bool = option(False, "Leave optimizer state out when loading.", flag_default=False)
    eod_mask_loss: bool = option(False, "Leave end-of-document tokens out of the loss.", flag_default=False)
    no_save_optim: bool = option(False, "Leave optimizer state out when saving.", flag_default=False)
    optimizer_cpu_offload: bool = option(False, "Keep optimizer state in CPU memory.", flag_default=False)
    use_precision_aware_optimizer: bool = option(
        False, "Let the optimizer keep its state in other precisions.", flag_default=False
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "The number of layers in the last pipeline stage.", unset=("none",), minimum=0
    )
    recompute_granularity: str = option(
        "full",
        "What is computed again in the backward pass: full layers, or selected parts.",
        choices=("full", "selective"),
    )
    recompute_method: str = option("uniform", "How the layers to recompute are chosen.", choices=("uniform", "block"))
    recompute_num_layers: int = option(1, "The number of layers per recomputed chunk.", minimum=1)
    attention_backend: bool = option(True, "Use the fused attention backend.")
    expert_model_parallel_size: int = option(1, "Expert parallel degree.", minimum=1)
    context_parallel_size: int = option(2, "Context parallel degree.", minimum=1, launch_default=None)
    attention_dropout: float = option(0.0, "Dropout in attention.", minimum=0, maximum=1)
    hidden_dropout: float = option(0.0, "Dropout of hidden states.", minimum=0, maximum=1)
    attention_softmax_in_fp32: bool = option(True, "Compute the softmax of attention in fp32.")
    expert_tensor_parallel_size: int = option(1, "Tensor parallel degree inside experts.", minimum=1)
    calculate_per_token_loss: bool = option(True, "Scale the loss by the number of tokens.")
    use_rotary_position_embeddings: bool = option(True, "Use rotary position embeddings.")
    num_micro_batches: int = option(
        1, "Micro-batches per pipeline step.", minimum=1, question="What is the number of micro-batches?"
    )
    gradient_clipping: float = option(
        1.0,
        "The largest allowed norm of the gradients (0: none).",
        minimum=0,
        question="What is the gradient clipping value based on global L2 Norm (0 to disable)?",
        flag_default=1.0,
    )
    sequence_parallelism: bool = option(
        False,
        "Shard activations along the sequence between tensor parallel regions.",
        question="Do you want to enable Sequence Parallelism?",
    )
    recompute_activations: bool = _used_as(
        "own",
        option(
            False,
            "Compute activations again instead of keeping them.",
            question="Do you want to enable selective activation recomputation?",
        ),
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard optimizer state over the data parallel ranks.",
        question="Do you want to shard optimizer state and gradients over the data parallel ranks?",
    )
    pipeline_model_parallel_split_rank: int | None = _only_python(None, "The rank where encoder and decoder part.")
    num_layers_per_virtual_pipeline_stage: int | None = _only_python(
        None, "The number of layers per virtual pipeline stage."
    )
    is_train_batch_min: bool = _only_python(True, "Of several loaders, take the smallest batch size.", use="own")
    train_iters: int | None = _only_python(None, "The number of training iterations.", use="schedule")
    train_samples: int | None = _only_python(None, "The number of training samples.", use="schedule")
    weight_decay_incr_style: str = _only_python("constant", "How weight decay grows.", use="schedule")
    start_weight_decay: float | None = _only_python(None, "The first weight decay.", use="schedule")
    end_weight_decay: float | None = _only_python(None, "The last weight decay.", use="schedule")
    lr_decay_style: str = _only_python("linear", "How the learning rate falls.", use="schedule")
    lr_decay_iters: int | None = _only_python(
        None, "The iterations over which the learning rate falls.", use="schedule"
    )
    lr_decay_samples: int | None = _only_python(None, "The samples over which the learning rate falls.", use="schedule")
    lr_warmup_iters: int | None = _only_python(
        None, "The iterations over which the learning rate rises.", use="schedule"
    )
    lr_warmup_samples: int | None = _only_python(
        None, "The samples over which the learning rate rises.", use="schedule"
    )
    lr_warmup_fraction: float | None = _only_python(
        None, "The part of the decay over which the learning rate rises.", use="schedule"
    )
    min_lr: float = _only_python(0, "The lowest learning rate.", use="schedule")
    consumed_samples: Any = _only_python(None, "Samples seen before, per data loader: train, evaluation, test.")
    no_wd_decay_cond: Any = _only_python(None, "Tells which parameters have no weight decay.")
    scale_lr_cond: Any = _only_python(None, "Tells which parameters have a scaled learning rate.")
    lr_mult: float = _only_python(1.0, "The scale of those learning rates.")
    megatron_dataset_flag: bool = _only_python(False, "The data is in Megatron's own format.")
    seq_length: int | None = _only_python(None, "The longest sequence.", use="own")
    encoder_seq_length: int | None = _only_python(None, "The longest sequence of the encoder.", use="own")
    decoder_seq_length: int | None = _only_python(None, "The longest sequence of the decoder.", use="own")
    tensorboard_dir: str | None = _only_python(None, "The folder of Megatron's tensorboard logs.", use="own")
    set_all_logging_options: bool = _only_python(False, "Log all that Megatron can log.", use="own")
    eval_iters: int = _only_python(100, "Iterations per evaluation.")
    eval_interval: int = _only_python(1000, "Iterations between evaluations.")
    return_logits: bool = _only_python(False, "Return the logits from forward passes.", use="own")
    custom_train_step_class: Any = _only_python(None, "A train step class of one's own.", use="own")
    custom_train_step_kwargs: Any = _only_python(None, "The arguments of that class.", use="own")
    custom_model_provider_function: Any = _only_python(None, "Builds the model.", use="own")
    custom_prepare_model_function: Any = _only_python(None, "Prepares the model.", use="own")
    custom_megatron_datasets_provider_function: Any = _only_python(None, "Builds the datasets.", use="own")
    custom_get_batch_function: Any = _only_python(None, "Gets a batch.", use="own")
    custom_loss_function: Any = _only_python(None, "Computes the loss.", use="own")
    other_megatron_args: Any = _only_python(None, "More Megatron arguments, by name.", use="own")


def option_names(use: Use) -> list[str]:
    """Return the names of the options that are for ``use``, in the order of declaration."""
    return [each.name for each in fields(MegatronOptions) if each.metadata.get(_USE, "argument") == use]


def check(settings: Settings) -> None:
    """Raise SettingError where a ParallelismConfig is given beside Megatron-LM."""
    if settings.parallelism is not None:
        raise SettingError(
            f"{settings.quote('paradigm.use_parallelism_config')} and {settings.quote('paradigm.use_megatron_lm')} "
            "exclude each other: Megatron-LM has its own degrees (`megatron_lm_tp_degree`, ...)."
        )


def missing() -> str:
    """Return that Megatron-LM isn't installed, and how to install it; empty if it is."""
    if can_be_found("megatron.training"):
        return ""
    return f"Megatron-LM ('megatron.training') isn't installed for {sys.executable}. {MEGATRON_REMEDY}"


GROUPS: Final = (
    Group(
        "megatron",
        MegatronOptions,
        "paradigm.use_megatron_lm",
        ("megatron_lm_plugin",),
        "MegatronLMPlugin",
        "MEGATRON_LM",
        check=check,
        missing=missing,
        engine=f"{__package__}.plugin:complete",
        questions=f"{__name__}:ask",
    ),
)


# --------------------------------------------------------------------------------------------------
# The questions of `accelerate config`


def ask(questions: Questionnaire, machine: str) -> bool:
    """Ask whether Megatron-LM is used on this type of ``machine``, and for its options; return whether it is."""
    if not (questions.advanced and machine == "MULTI_GPU" and questions.uses("MEGATRON_LM")):
        return False
    degrees = questions.several(MegatronOptions, ("tp_degree",))
    if degrees["tp_degree"] > 1:
        questions.one(MegatronOptions, "sequence_parallelism", default=True)
    if int(questions.one(MegatronOptions, "pp_degree")) > 1:
        questions.one(MegatronOptions, "num_micro_batches")
    for name, default in (
        ("recompute_activations", True),
        ("use_distributed_optimizer", True),
        ("gradient_clipping", 1.0),
    ):
        questions.one(MegatronOptions, name, default=default)
    return True
