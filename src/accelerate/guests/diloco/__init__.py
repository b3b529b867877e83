"""DiLoCo: islands of ranks train alone for many steps, and exchange compressed changes of their weights. Internal.

- `diloco`: the context around a training loop.
- `islands`: which ranks form an island, and how gradients stay inside of it.
- `fragments`: the outer weights, and their exchange, one fragment of the model at a time.
- `compression`: changes of weights in 8 or 2 bits.
- `state`: what a checkpoint holds.
- `local_sgd`: replicas that average their weights, whole and uncompressed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; "Streaming DiLoCo with
overlapping communication", 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ...errors import SettingError
from ...seams import Guest
from ...settings.option import Group, OptionGroup, option, option_group

if TYPE_CHECKING:
    from ...settings.tree import Settings

GUEST: Final = Guest(settings=f"{__name__}:GROUPS")


@final
@option_group
class IslandOptions(OptionGroup, title="Islands", env="ACCELERATE_", key="", flag=""):
    """The islands of `DiLoCo`, unless its argument says them."""

    islands: int | None = option(
        None,
        "Divide the processes into so many islands of consecutive ranks, which DiLoCo in the script lets train apart.",
        kind="int",
        minimum=2,
        quiet=True,
        guest="diloco",
    )


def check(settings: Settings) -> None:
    """Raise SettingError if the processes can't be divided so, or are replicas that are islands already."""
    asked, size = settings.find(IslandOptions), settings.launch.num_processes
    if asked is None or asked.islands is None:
        return
    if size is not None and size % asked.islands:
        raise SettingError(
            f"{settings.quote('diloco.islands')}: {settings.quote('launch.num_processes')} can't be divided into so "
            "many islands of one size. Choose a divisor."
        )
    if settings.launch.keep_replicas:
        raise SettingError(
            f"{settings.quote('diloco.islands')} with {settings.quote('launch.keep_replicas')}: each replica is an "
            "island. Leave the number of islands out."
        )


GROUPS: Final = (Group("diloco", IslandOptions, check=check),)
