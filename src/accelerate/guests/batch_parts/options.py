"""The options of parts and of fingerprints, and their checks; imported with the settings, so torch isn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...settings.option import Group, OptionGroup, option, option_group

if TYPE_CHECKING:
    from ...settings.tree import Settings


@final
@option_group
class BatchPartsOptions(OptionGroup, title="Parts of a batch", env="ACCELERATE_", key="", flag=""):
    """The division of each update's global batch into parts, so that any number of ranks computes the same bits."""

    batch_parts: int | None = option(
        None,
        "Compute each update in this many parts of one loader batch each. The number of processes has to divide it. "
        "All results are then the same bits for any such number of processes.",
        kind="int",
        minimum=1,
        quiet=True,
        guest="batch_parts",
    )


@final
@option_group
class FingerprintOptions(OptionGroup, title="Fingerprints", env="ACCELERATE_", key="", flag=""):
    """The file of fingerprints, for a comparison of two runs update by update."""

    fingerprint_every: int | None = option(
        None,
        "Write accelerator.fingerprint() to fingerprints.jsonl in the logging folder each time so many updates are "
        "done.",
        kind="int",
        minimum=1,
        quiet=True,
        guest="batch_parts",
    )


def check(settings: Settings) -> None:
    """Raise SettingError if parts are asked for beside an engine that sums gradients itself."""
    asked = settings.find(BatchPartsOptions)
    if asked is None or asked.batch_parts is None:
        return
    quoted = settings.quote("batch_parts.batch_parts")
    for row in ("deepspeed", "megatron_lm"):
        if getattr(settings, row, None) is not None:
            raise SettingError(
                f"{quoted} with {row}: the engine sums gradients itself, and its order depends on the number of "
                "processes. Use replicas or FSDP 2, or leave batch_parts out."
            )


GROUPS: Final = (
    Group("batch_parts", BatchPartsOptions, check=check, keyword="batch_parts"),
    Group("fingerprints", FingerprintOptions, keyword="fingerprint_every"),
)
