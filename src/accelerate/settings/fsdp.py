"""Options of fully sharded data parallel, versions 1 and 2."""

from __future__ import annotations

from typing import Any, Literal

from .option import FALSE_WORDS, TRUE_WORDS, OptionGroup, option, option_group

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]

#: What the strategies of version 1 mean for version 2's reshard_after_forward; NO_SHARD has no equal there.
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
#: How version 2 is asked for what HYBRID_SHARD is in version 1.
HYBRID_IN_VERSION_2 = (
    "Version 2 takes the groups of a hybrid strategy from the device mesh, and shards over all ranks without one: "
    "give a ParallelismConfig (`--use_parallelism_config`) with dp_replicate_size (the number of copies) and "
    "dp_shard_size (the ranks of one copy)"
)
#: Options that version 2 has no use for, and why. sharding_strategy is converted instead.
ONLY_VERSION_1 = {
    "backward_prefetch": "version 2 always prefetches in the backward pass",
    "forward_prefetch": "version 2 prefetches by itself",
    "use_orig_params": "version 2 always keeps the original parameters",
    "sync_module_states": "version 2 broadcasts with fsdp_cpu_ram_efficient_loading",
}


def _numbered(choices: list[str]) -> dict[str, str]:
    """Old files and variables give the position (from 1) instead of the name."""
    return {str(position): choice for position, choice in enumerate(choices, start=1)}


@option_group
class FsdpOptions(OptionGroup, title="FSDP", env="FSDP_", section="fsdp_config", key="fsdp_", flag="fsdp_"):
    """Options of sharding parameters, gradients and optimizer state; None where it depends on the version."""

    fsdp_version: Literal[1, 2] = option(
        1,
        "The version of FSDP: 2 is the current one.",
        stem="version",
        choices=(1, 2),
        question="What should be your FSDP version?",
        flag_default="1",
    )
    sharding_strategy: Any = option(
        None,
        "Version 1: what is sharded. Version 2 has fsdp_reshard_after_forward instead.",
        kind="str",
        choices=FSDP_SHARDING_STRATEGY,
        aliases=_numbered(FSDP_SHARDING_STRATEGY),
        launch_default="FULL_SHARD",
        question="What should be your sharding strategy?",
        flag_default="FULL_SHARD",
    )
    reshard_after_forward: Any = option(
        None,
        "Version 2: free gathered parameters after the forward pass (true saves memory, false traffic). "
        "Version 1: a sharding strategy.",
        kind="str",
        choices=("true", "false", *FSDP_SHARDING_STRATEGY),
        aliases={**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)},
        launch_default=True,
        question="Do you want to enable resharding after forward?",
        flag_default="true",
    )
    backward_prefetch: Any = option(
        None,
        "Version 1: when the next parameters are gathered in the backward pass.",
        kind="str",
        choices=FSDP_BACKWARD_PREFETCH,
        key_aliases=("fsdp_backward_prefetch_policy",),
        aliases=_numbered(FSDP_BACKWARD_PREFETCH),
        question="What should be your FSDP's backward prefetch policy?",
    )
    mixed_precision_policy: Any = option(None, "The precisions of parameters, reductions and outputs.", kind="object")
    auto_wrap_policy: Any = option(
        None,
        "How the model is cut into units: by layer class, by size, or not at all.",
        kind="str",
        choices=FSDP_AUTO_WRAP_POLICY,
        question="What should be your auto wrap policy?",
    )
    cpu_offload: Any = option(
        False,
        "Keep parameters and gradients in CPU memory between uses.",
        kind="bool",
        stem="offload_params",
        question="Do you want to offload parameters and gradients to CPU?",
        flag_default="false",
    )
    ignored_modules: Any = option(
        None, "A regular expression for the names of modules that are not sharded.", kind="str", flag=None
    )
    state_dict_type: Any = option(
        None,
        "The form of saved state: whole, or in shards.",
        kind="str",
        choices=FSDP_STATE_DICT_TYPE,
        aliases=_numbered(FSDP_STATE_DICT_TYPE),
        question="What should be your FSDP's state dict type?",
    )
    state_dict_config: Any = option(None, "How model state is gathered for saving.", kind="object")
    optim_state_dict_config: Any = option(None, "How optimizer state is gathered for saving.", kind="object")
    limit_all_gathers: bool = option(
        True, "Let the CPU wait before it schedules more gathers than memory holds.", env=None, key=None, flag=None
    )
    use_orig_params: bool | None = option(
        False,
        "Version 1: keep the original parameters visible, frozen and trainable mixed.",
        launch_default=True,
        question="Do you want to enable FSDP's `use_orig_params` feature?",
        flag_default="true",
    )
    param_init_fn: Any = option(None, "Called on each module on the meta device.", kind="object")
    sync_module_states: bool | None = option(
        False,
        "Version 1: start from rank 0's parameters and buffers.",
        launch_default=True,
        question="Should each FSDP unit start from the parameters of rank 0?",
        flag_default="true",
    )
    forward_prefetch: bool | None = option(
        False,
        "Version 1: gather the next parameters early in the forward pass.",
        question="Do you want to enable FSDP's forward prefetch policy?",
        flag_default="false",
    )
    activation_checkpointing: bool = option(
        False,
        "Compute activations again in the backward pass instead of keeping them.",
        question="Do you want to enable FSDP activation checkpointing?",
        flag_default="false",
    )
    activation_checkpointing_offload: bool = option(
        False,
        "Version 2, with activation checkpointing: keep the inputs of each layer in CPU memory.",
        flag_default="false",
    )
    cpu_ram_efficient_loading: bool = option(
        False,
        "Only rank 0 loads the weights; the others receive their part.",
        launch_default=True,
        question="Do you want to enable CPU RAM efficient model loading?",
        flag_default="true",
    )
    transformer_cls_names_to_wrap: Any = option(
        None,
        "The classes of the layers that become units, separated by commas.",
        kind="list",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        stem="transformer_layer_cls_to_wrap",
        question="Specify the comma-separated list of transformer layer class names (case-sensitive) to wrap",
    )
    min_num_params: int | None = option(
        None,
        "The number of parameters from which a module becomes a unit.",
        minimum=0,
        launch_default=100_000_000,
        question="What should be your FSDP's minimum number of parameters for default auto wrapping?",
        flag_default=100_000_000,
    )
