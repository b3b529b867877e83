"""Options of DeepSpeed's engine and launcher, their checks, and the questions of ``accelerate config`` about them.

It is imported with the settings, so torch isn't.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from ...errors import SettingError
from ...optional import installed_version
from ...settings.option import Group, OptionGroup, option, option_group

if TYPE_CHECKING:
    from ...commands.config.questions import Questionnaire
    from ...settings.tree import Settings

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


def check(settings: Settings) -> None:
    """Raise SettingError where options of DeepSpeed contradict each other, unless the script made the plugin."""
    deepspeed, launch = settings.find(DeepSpeedOptions), settings.find(DeepSpeedLaunchOptions)
    if deepspeed is None or launch is None or settings.source_of("deepspeed.zero_stage").kind == "argument":
        return
    for part in ("optimizer", "param"):
        device, path = f"offload_{part}_device", f"offload_{part}_nvme_path"
        if getattr(deepspeed, device) == "nvme" and getattr(deepspeed, path) in (None, "none"):
            asked = settings.quote(f"deepspeed.{device}")
            raise SettingError(f"{asked} needs `{path}`: give the folder on the NVMe disk.")
    if launch.deepspeed_inclusion_filter and launch.deepspeed_exclusion_filter:
        raise SettingError(
            f"{settings.quote('deepspeed_launch.deepspeed_inclusion_filter')} and "
            f"{settings.quote('deepspeed_launch.deepspeed_exclusion_filter')} exclude each other. Keep one of them."
        )


def missing() -> str:
    """Return that DeepSpeed isn't installed, and how to install it; empty if it is."""
    if installed_version("deepspeed") is not None:
        return ""
    return f"'deepspeed' isn't installed for {sys.executable}. Install it with: pip install \"accelerate[deepspeed]\""


GROUPS: Final = (
    Group(
        "deepspeed",
        DeepSpeedOptions,
        "paradigm.use_deepspeed",
        ("deepspeed_plugin", "deepspeed_plugins"),
        "DeepSpeedPlugin",
        "DEEPSPEED",
        keys_of_file="deepspeed_launch.config_fields",
        check=check,
        missing=missing,
        engine=f"{__package__}.plugin:complete",
        questions=f"{__name__}:ask",
    ),
    Group("deepspeed_launch", DeepSpeedLaunchOptions, host_file="deepspeed_hostfile"),
)


# --------------------------------------------------------------------------------------------------
# The questions of `accelerate config`


def ask(questions: Questionnaire, machine: str) -> bool:
    """Ask whether DeepSpeed is used on this type of ``machine``, and for its options; return whether it is."""
    if not questions.uses("DEEPSPEED", "an engine that shards and offloads; a package"):
        return False
    question = "Do you want to specify a json file to a DeepSpeed config?"
    if questions.wants(question, DeepSpeedOptions, "hf_ds_config"):
        questions.one(DeepSpeedOptions, "hf_ds_config", required=True)
    else:
        stage = int(questions.one(DeepSpeedOptions, "zero_stage", default=2))
        if stage >= 2:
            for what in ("optimizer", "param"):
                if questions.one(DeepSpeedOptions, f"offload_{what}_device") == "nvme":
                    questions.one(DeepSpeedOptions, f"offload_{what}_nvme_path", default="/nvme")
        questions.one(DeepSpeedOptions, "gradient_accumulation_steps", default=1)
        if questions.wants("Do you want to use gradient clipping?", DeepSpeedOptions, "gradient_clipping"):
            questions.one(DeepSpeedOptions, "gradient_clipping", default=1.0)
        if stage == 3:
            questions.one(DeepSpeedOptions, "zero3_save_16bit_model")
    questions.one(DeepSpeedOptions, "zero3_init_flag", default=False)
    question = "Do you want to enable Mixture-of-Experts training (MoE)?"
    if questions.wants(question, DeepSpeedOptions, "transformer_moe_cls_names"):
        questions.one(DeepSpeedOptions, "transformer_moe_cls_names", required=True)
    questions.parallelism("sp_size")
    if questions.num_machines > 1:
        launcher = questions.one(DeepSpeedLaunchOptions, "deepspeed_multinode_launcher", default="pdsh")
        if launcher != "standard":
            questions.one(DeepSpeedLaunchOptions, "deepspeed_hostfile", required=True)
            for which in ("exclusion", "inclusion"):
                name = f"deepspeed_{which}_filter"
                if questions.wants(f"Do you want to specify {which} filter string?", DeepSpeedLaunchOptions, name):
                    questions.one(DeepSpeedLaunchOptions, name, required=True)
    return True
