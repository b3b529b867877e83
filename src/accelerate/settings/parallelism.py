"""Options of parallelism in several dimensions: replicate, shard, tensor, context, sequence."""

from __future__ import annotations

from typing import Any, Literal

from .option import OptionGroup, option, option_group

ATTENTION_KINDS = ("sdpa", "flash_attention_2", "flash_attention_3")


class _ParallelismGroup(
    OptionGroup,
    title="Parallelism",
    env="PARALLELISM_CONFIG_",
    section="parallelism_config",
    key="parallelism_config_",
    flag="parallelism_config_",
    parses_defaults=True,
):
    """The title of these groups, the prefixes of their names, and how their flags parse."""


@option_group
class ParallelismOptions(_ParallelismGroup):
    """The degree of each kind of parallelism; their product is the number of processes."""

    dp_replicate_size: int = option(
        1, "How many copies of the model there are.", minimum=1, question="What is the data parallelism replicate size?"
    )
    dp_shard_size: int = option(
        1,
        "Over how many processes each copy is sharded.",
        minimum=1,
        question="What is the FSDP/HSDP data parallelism shard size?",
    )
    tp_size: int = option(
        1, "Over how many processes each layer is split.", minimum=1, question="What is the tensor parallelism size?"
    )
    cp_size: int = option(
        1,
        "Over how many processes each sequence is split (ring attention).",
        minimum=1,
        question="What is the context parallelism size?",
    )
    cp_backend: Literal["torch"] = option("torch", "What implements context parallelism.", choices=("torch",))
    sp_size: int = option(
        1,
        "Over how many processes each sequence is split (Ulysses).",
        minimum=1,
        question="What is the sequence parallelism size?",
    )
    sp_backend: Literal["deepspeed", "torch"] = option(
        "deepspeed",
        "What implements sequence parallelism: DeepSpeed, or this package over torch.",
        choices=("deepspeed", "torch"),
        question="Which implementation of sequence parallelism do you want to use?",
    )
    tp_handler: Any = option(None, "More about tensor parallelism.", kind="object")
    cp_handler: Any = option(None, "More about context parallelism.", kind="object")
    sp_handler: Any = option(None, "More about sequence parallelism.", kind="object")
    pp_size: int = option(
        1,
        "Over how many processes the layers are dealt, as stages of a pipeline.",
        question="What is the pipeline parallelism size?",
        minimum=1,
    )
    # No variable of its own: others write PARALLELISM_CONFIG_EP_SIZE for a degree that is no factor of theirs.
    pp_handler: Any = option(None, "More about pipelines.", kind="object")
    ep_size: int = option(1, "Over how many processes the experts of a layer are dealt.", minimum=1, env=None)
    ep_handler: Any = option(None, "More about expert parallelism.", kind="object")


@option_group
class TensorParallelOptions(OptionGroup, title="Parallelism"):
    """Further options of tensor parallelism."""

    enable_async_tp: bool = option(False, "Overlap communication and computation.")
    plan: Any = option(None, "How each layer is cut: a mapping from patterns of names to styles.", kind="object")


@option_group
class ContextParallelOptions(_ParallelismGroup):
    """Further options of context parallelism."""

    cp_comm_strategy: Literal["allgather", "alltoall"] = option(
        "allgather",
        "How keys and values travel.",
        choices=("allgather", "alltoall"),
        question="What is the compute parallelism communication strategy?",
    )


@option_group
class SequenceParallelOptions(_ParallelismGroup):
    """Further options of sequence parallelism."""

    sp_seq_length: int | None = option(None, "The sequence length, when it is always the same.", minimum=1)
    sp_seq_length_is_variable: bool = option(True, "Sequence lengths differ between batches.")
    sp_attn_implementation: str | None = option(
        None,
        "The model's attention: sdpa, flash_attention_2, flash_attention_3, or a flash kernel of the hub.",
        launch_default="sdpa",
        flag_default="sdpa",
    )
