"""The options of runs that continue when ranks are lost; imported with the settings, so torch isn't."""

from __future__ import annotations

from typing import Final, final

from ...settings.option import Group, OptionGroup, option, option_group


@final
@option_group
class ReplicaOptions(OptionGroup, title="Lost replicas", key="", flag=""):
    """When a rank counts as lost."""

    lost_after_seconds: float = option(
        0.0,
        "Under --keep_replicas, kill and replace a rank that hasn't answered for so long after all others; 0: never.",
        key=None,
        minimum=0,
        flag_default=0.0,
        guest="fault_tolerance",
    )


GROUPS: Final = (Group("replicas", ReplicaOptions, exported=False),)
