"""Models that were sharded before ``prepare``: they are trained in their own layout. Internal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...seams import Candidate, Guest

if TYPE_CHECKING:
    from ...distributed.world import World
    from ...settings.tree import Settings


def _awaits_shards(settings: Settings, world: World) -> bool:
    """Return True if the settings shard parameters but name no engine for it: the model must come sharded."""
    config = settings.parallelism
    if config is None or world.size == 1 or world.kind.runtime or settings.fsdp is not None or settings.engine:
        return False
    return config.pp_size == 1 and config.tp_size != world.size and (config.dp_shard_size > 1 or config.tp_size > 1)


GUEST: Final = Guest(strategies=(Candidate(f"{__name__}.strategy", "Adopted", _awaits_shards, takes_shards=True),))
