"""The questions of ``accelerate config`` about DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import DeepSpeedLaunchOptions, DeepSpeedOptions

if TYPE_CHECKING:
    from ...commands.config.questions import Questionnaire


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
