"""The groups of settings of Megatron-LM, and their checks; imported with the settings, so torch isn't."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ...errors import SettingError
from ...optional import MEGATRON_REMEDY, can_be_found
from ...settings.group import Group
from .options import MegatronOptions

if TYPE_CHECKING:
    from ...settings.tree import Settings


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
        questions=f"{__package__}.questions:ask",
    ),
)
