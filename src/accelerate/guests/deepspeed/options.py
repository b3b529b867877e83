"""Options of DeepSpeed: its engine, and its launcher."""

from __future__ import annotations

from typing import Any

from ...settings.option import OptionGroup, option, option_group

OFFLOAD_DEVICES = ("none", "cpu", "nvme")
DEEPSPEED_MULTINODE_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")


@option_group
class DeepSpeedOptions(
    OptionGroup, title="DeepSpeed", env="ACCELERATE_DEEPSPEED_", section="deepspeed_config", key="", flag=""
):
    """Options of the DeepSpeed engine; "auto" is filled in from the objects that are prepared."""

    hf_ds_config: Any = option(
        None,
        "A DeepSpeed configuration: its path, or the document itself.",
        kind="document",
        stem="deepspeed_config_file",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        unset=("none",),
        question="Please enter the path to the json DeepSpeed config file",
    )
    gradient_accumulation_steps: Any = option(
        "auto",
        "The number of batches whose gradients make one optimizer step.",
        kind="int",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        aliases={"auto": "auto"},
        minimum=1,
        quiet=True,
        question="How many gradient accumulation steps you're passing in your script?",
    )
    gradient_clipping: Any = option(
        "auto",
        "The largest allowed norm of the gradients.",
        kind="float",
        env="ACCELERATE_GRADIENT_CLIPPING",
        aliases={"auto": "auto"},
        unset=("none",),
        minimum=0,
        quiet=True,
        question="What is the gradient clipping value?",
    )
    zero_stage: int = option(
        2,
        "The ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded.",
        choices=(0, 1, 2, 3),
        question="What should be your DeepSpeed's ZeRO optimization stage?",
    )
    is_train_batch_min: bool = option(
        True, "Of several loaders, take the smallest batch size.", env=None, key=None, flag=None
    )
    offload_optimizer_device: str = option(
        "none",
        "Where optimizer state is kept between uses (stages 2 and 3).",
        choices=OFFLOAD_DEVICES,
        question="Where to offload optimizer states?",
    )
    offload_param_device: str = option(
        "none",
        "Where parameters are kept between uses (stage 3).",
        choices=OFFLOAD_DEVICES,
        question="Where to offload parameters?",
    )
    offload_optimizer_nvme_path: str = option(
        "none", "The folder for optimizer state on NVMe.", question="Nvme Path to offload optimizer states?"
    )
    offload_param_nvme_path: str = option(
        "none", "The folder for parameters on NVMe.", question="Nvme Path to offload parameters?"
    )
    zero3_init_flag: bool | None = option(
        None,
        "Stage 3: shard parameters while the model is built. Default: on for stage 3.",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        question="Do you want to build models in shards from the start (`deepspeed.zero.Init`)?",
    )
    zero3_save_16bit_model: bool = option(
        False,
        "Stage 3: gather 16-bit weights when saving.",
        question="Do you want to save 16-bit model weights when using ZeRO Stage-3?",
    )
    transformer_moe_cls_names: str | None = option(
        None,
        "The classes of mixture-of-experts layers, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        stem="deepspeed_moe_layer_cls_names",
        question="Specify the comma-separated list of transformers MoE layer class names (case-sensitive)",
    )
    enable_msamp: bool | None = option(
        None,
        "Use MS-AMP for fp8 with DeepSpeed, which isn't supported any more.",
        env=None,
        key=None,
        flag=None,
    )
    msamp_opt_level: str = option(
        "O1",
        "The optimization level of MS-AMP with DeepSpeed, which isn't supported any more.",
        env="ACCELERATE_FP8_OPT_LEVEL",
        key=None,
        flag=None,
        choices=("O1", "O2"),
        quiet=True,
    )


@option_group
class DeepSpeedLaunchOptions(OptionGroup, title="DeepSpeed", section="deepspeed_config", key="", flag=""):
    """Options of DeepSpeed's own launcher for several machines."""

    deepspeed_hostfile: str | None = option(
        None,
        "The file that lists the hosts and their slots.",
        question="What is the path of the DeepSpeed hostfile?",
    )
    deepspeed_exclusion_filter: str | None = option(
        None, "Hosts and devices to leave out.", question="DeepSpeed exclusion filter string"
    )
    deepspeed_inclusion_filter: str | None = option(
        None, "The only hosts and devices to use.", question="DeepSpeed inclusion filter string"
    )
    deepspeed_multinode_launcher: str | None = option(
        None,
        "How DeepSpeed reaches the other machines; pdsh when it is not given.",
        choices=DEEPSPEED_MULTINODE_LAUNCHERS,
        question="Which Type of launcher do you want to use?",
    )
    config_fields: list[str] | None = option(
        None,
        "The DeepSpeed options that the configuration file of the launcher gives.",
        env="ACCELERATE_CONFIG_DS_FIELDS",
        key=None,
        flag=None,
    )
