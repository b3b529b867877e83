"""The groups of settings of DeepSpeed, and their checks; imported with the settings, so torch isn't."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ...errors import SettingError
from ...optional import installed_version
from ...settings.group import Group
from .options import DeepSpeedLaunchOptions, DeepSpeedOptions

if TYPE_CHECKING:
    from ...settings.tree import Settings


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
        questions=f"{__package__}.questions:ask",
    ),
    Group("deepspeed_launch", DeepSpeedLaunchOptions, host_file="deepspeed_hostfile"),
)
